"""Preparation of a model's modules, common to all strategies."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from gangline.comm.base import Comm
from gangline.errors import UserError
from gangline.model.contracts import OwnMatmuls, bind_around
from gangline.model.linear import Linear
from gangline.plan import Plan, matches
from gangline.precision import Precision
from gangline.runtime import Finish


def set_matmuls(model: nn.Module, plan: Plan, precision: Precision) -> None:
    """Set the matmul of every `Linear` as the precision requires; for `plan.master_dtype`, in the dtype of the weights.

    Other modules with matmuls get the precision (`OwnMatmuls`). Raises UserError for a `Linear.matmul` that user code
    has replaced.
    """
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            refuse_own(module, path, "matmul", F.linear)
            full = any(matches(pattern, path) for pattern in plan.master_dtype)
            module.matmul = multiply_full if full else precision.linear
        elif isinstance(module, OwnMatmuls):
            module.set_precision(precision)


def refuse_own(module: nn.Module, path: str, name: str, default: object) -> None:
    """Raise UserError if user code has replaced an attribute that a strategy sets."""
    if getattr(module, name) is not default:
        raise UserError(
            f"{path}.{name} was replaced by a custom function.",
            "The strategy sets the attribute itself, and would discard the custom function.",
            f"Call the custom function in the `forward` of the module, around `self.{name}`.",
        )


def multiply_full(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Multiply x Wᵀ + b in the dtype of the weights."""
    return F.linear(x.to(w.dtype), w, b)


def bind_folds(model: nn.Module, plan: Plan, comm_of: Callable[[str], Comm]) -> None:
    """Bind each module whose parameters are sharded along a fold to the Comm of the fold, once.

    For such a parameter, the nearest enclosing module that is `Bindable` is bound. Raises TypeError if no enclosing
    module is `Bindable`.
    """
    folds = {fold.name for fold in plan.folds}
    bound: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        fold = next((axis for axis in plan.get_shard_rules(name, parameter.dim()) if axis in folds), None)
        if fold is not None:
            bind_around(model, name, f"the fold {fold!r}", comm_of(fold), bound)


def finish_blocks(model: nn.Module, plan: Plan, finish: Finish) -> None:
    """Pass each block of the model, and each block inside the head, to `finish`, with its path."""
    for index, block in enumerate(model.get_submodule(plan.blocks).children()):
        finish(block, f"{plan.blocks}.{index}")
    finish_head(model, plan, finish)


def finish_head(model: nn.Module, plan: Plan, finish: Finish) -> None:
    """Pass each block inside the head to `finish`, with its path."""
    for path in plan.list_blocks_in_head([path for path, _ in model.named_modules()]):
        finish(model.get_submodule(path), path)
