"""Tensor parallelism of a model: make modules compute with the shards that the plan's rules for `tp` define."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

import torch.nn.functional as F
from torch import nn

from gangline import UserError
from gangline.comm.base import Comm
from gangline.model.calls import Call, LossCall, call_of
from gangline.model.contracts import OwnMatmuls, bind_around, bind_linear, get_seam_function
from gangline.model.linear import Embedding, Linear
from gangline.model.untraced import untraced
from gangline.plan import Plan, matches
from gangline.precision import Precision
from gangline_basics.model.loss import CrossEntropy
from gangline_basics.model.seams import call_at
from gangline_basics.parallel.prepare import multiply_full, refuse_own
from gangline_parallel_megatron_style.tensor.embedding import Lookup
from gangline_parallel_megatron_style.tensor.loss import VocabularyLoss
from gangline_parallel_megatron_style.tensor.region import Region
from gangline_parallel_megatron_style.tensor.sequence import compute_shard_loss, look_up_shard
from gangline_parallel_megatron_style.tensor.setting import Setting

AXIS = "tp"


def cut_modules(
    model: nn.Module,
    plan: Plan,
    comm: Comm,
    precision: Precision,
    *,
    sequence_parallel: bool,
    first_rows: Mapping[str, int],
    losses: Mapping[str, Call | None],
) -> Setting:
    """Make the modules of `model` compute with their parameters' shards on this rank of `comm`; return their setting.

    Sets the `matmul` of every `Linear`, the `lookup` of every `Embedding` and the `loss` seam. For every other sharded
    parameter, calls `bind(comm)` on the nearest enclosing module that has `bind`, once per module. Does not change the
    parameters: the caller replaces them by their shards, before or after the call. A pipeline stage may lack modules
    that the plan names.

    first_rows  global index of this rank's first row of every sharded embedding and head, by the weight's stored name
    losses      calls that nodes declare at the `loss` seams (`gangline_basics.model.seams.get_calls`)

    Raises TypeError if a module cannot compute with its shard. Raises UserError if the loss over a sharded vocabulary
    would differ from the module's loss, or if a matmul or lookup is a custom function.
    """
    setting = Setting(comm, precision, sequence_parallel)
    _Cutter(model, plan, setting, first_rows, losses).run()
    return setting


class _Cutter:
    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        setting: Setting,
        first_rows: Mapping[str, int],
        losses: Mapping[str, Call | None],
    ) -> None:
        self.model, self.plan, self.setting, self.first_rows = model, plan, setting, first_rows
        self.losses = losses
        self.sharded_dims: dict[str, dict[str, int]] = {}  # module path -> name of a parameter in the module -> dim
        for name, parameter in model.named_parameters(remove_duplicate=False):
            rule = plan.get_shard_rules(name, parameter.dim()).get(AXIS)
            if rule is not None:
                path, _, own = name.rpartition(".")
                self.sharded_dims.setdefault(path, {})[own] = rule.dim
        self.regions: dict[str, Region] = {}  # path of a module that contains linears -> region
        self.bound: set[str] = set()

    def run(self) -> None:
        modules = dict(self.model.named_modules())
        linears = [path for path, module in modules.items() if isinstance(module, Linear)]
        columns = Counter(_get_parent(path) for path in linears if self.sharded_dims.get(path, {}).get("weight") == 0)
        self.regions = {parent: Region(self.setting, columns[parent]) for parent in map(_get_parent, linears)}
        losses = [seam.pattern for seam in self.plan.seams if seam.name == "loss"]
        for path, module in modules.items():
            if isinstance(module, Linear):
                self._set_matmul(path, module)
            elif isinstance(module, OwnMatmuls):
                module.set_precision(self.setting.precision)
            elif isinstance(module, Embedding):
                self._set_lookup(path, module)
            elif any(matches(pattern, path) and get_seam_function(module, "loss") for pattern in losses):
                self._set_loss(path, module)
            elif path in self.sharded_dims:
                name = f"{path}.{next(iter(self.sharded_dims[path]))}"
                bind_around(self.model, name, AXIS, self.setting.comm, self.bound)

    def _set_matmul(self, path: str, linear: Linear) -> None:
        refuse_own(linear, path, "matmul", F.linear)
        dim = self.sharded_dims.get(path, {}).get("weight")
        full = any(matches(pattern, path) for pattern in self.plan.master_dtype)
        if dim is None:
            linear.matmul = multiply_full if full else self.setting.precision.linear
        elif full:
            raise TypeError(
                f"{path} is both sharded along {AXIS} and in master_dtype of the plan, which is not supported"
            )
        else:
            region = self.regions[_get_parent(path)]
            linear.matmul = region.multiply_rowwise if dim else region.multiply_colwise
            linear.forward = untraced(linear.forward)  # type: ignore[method-assign]  # with its transfers
            bind_linear(linear, path, self.setting.comm, self.bound)

    def _set_lookup(self, path: str, embedding: Embedding) -> None:
        first = self._find_first_row(path)
        if first is not None or self.setting.sequence_parallel:
            refuse_own(embedding, path, "lookup", F.embedding)
        if first is not None:
            embedding.lookup = Lookup(self.setting, first)
        elif self.setting.sequence_parallel:
            embedding.lookup = partial(look_up_shard, setting=self.setting)

    def _set_loss(self, path: str, head: nn.Module) -> None:
        first = self._find_first_row(path)
        if first is not None:
            call = _match_call(path, head.loss, call_at(self.losses, path))
            chunk = head.loss.chunk if isinstance(head.loss, CrossEntropy) else None
            head.loss = VocabularyLoss(self.setting, first, call, chunk)  # type: ignore[assignment]
        elif self.setting.sequence_parallel:
            head.loss = partial(compute_shard_loss, loss=head.loss, comm=self.setting.comm)  # type: ignore[assignment,arg-type]

    def _find_first_row(self, path: str) -> int | None:
        dims = self.sharded_dims.get(path)
        if not dims:
            return None
        if dims != {"weight": 0}:
            raise TypeError(
                f"{AXIS} can shard only dim 0 of the weight of {path}; the plan shards (parameter: dim) {dims}"
            )
        return self.first_rows[self.plan.get_owner(f"{path}.weight")]


def _match_call(path: str, function: object, declared: Call | None) -> LossCall:
    """Return the loss to compute over a sharded vocabulary.

    Raises UserError unless the head's node and its loss function declare equal losses.
    """
    own = call_of(function)
    if not isinstance(own, LossCall) or own != declared:
        raise UserError(
            f"{path}: tensor parallelism would replace the loss function by one over the sharded vocabulary, and the "
            f"function's loss is {'not declared' if own is None else own}.",
            f"The node of {path} declares: {'no loss' if declared is None else declared}.",
            f"Declare one loss in `get_seams` of the node and `computes` of the function, or replicate {path}.weight.",
        )
    return own


def _get_parent(path: str) -> str:
    return path.rpartition(".")[0]
