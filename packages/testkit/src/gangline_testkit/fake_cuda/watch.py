"""Watch the operators on the fake device: kernels by name, and the places where the host waits for the device."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators whose result has a size that only the device knows, so the host waits.
SIZES_UNKNOWN = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
}
# Operators that compute nothing on the device.
NO_KERNEL = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::detach",
    "aten::alias",
    "aten::_local_scalar_dense",
    "aten::record_stream",
    "aten::is_pinned",
    "aten::_reshape_alias",
    "aten::_unsafe_view",
    "aten::set_",
    "aten::resize_",
    "aten::lift_fresh",
}
# Operators that raise on a GPU with `torch.use_deterministic_algorithms(True)`, from torch's documentation.
NOT_DETERMINISTIC = {
    "aten::cumsum",
    "aten::cumsum_",
    "aten::histc",
    "aten::kthvalue",
    "aten::median",
    "aten::bincount",
    "aten::put_",
    "aten::nll_loss2d_forward",
    "aten::_embedding_bag_dense_backward",
    "aten::adaptive_avg_pool2d_backward",
    "aten::upsample_bilinear2d_backward",
    "aten::_ctc_loss_backward",
    "aten::grid_sampler_2d_backward",
    "aten::reflection_pad2d_backward",
    "aten::resize_",
}
_active: list[Watch] = []


class Watch(TorchDispatchMode):
    """A mode that counts; use it as a context.

    waits    waits of the host for the device, by "what at file:function"
    kernels  operators that compute on the device, by name; a call of a Triton kernel is one
    """

    supports_higher_order_operators = True  # FlexAttention

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    def __enter__(self) -> Watch:
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _active.remove(self)
        super().__exit__(*error)

    @classmethod
    def is_infra_mode(cls) -> bool:
        return False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if isinstance(operator, HigherOrderOperator):
            self.kernels[operator.name()] += 1
            return operator(*args, **options)
        name = operator.name().split(".")[0]
        tensors = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        on_device = any(x.is_cuda for x in tensors) or torch.device(options.get("device") or "cpu").type == "cuda"
        if on_device:
            if name in NOT_DETERMINISTIC and refuses(name, tensors):
                raise RuntimeError(f"{name} does not have a deterministic implementation on CUDA")
            if wait := find_wait(name, args, options):
                self.waits[f"{wait} at {find_place()}"] += 1
            if computes(operator, name):
                self.kernels[name] += 1
        return operator(*args, **options)


def refuses(name: str, tensors: list[Tensor]) -> bool:
    """Return whether torch would refuse the operator on a GPU, with the present settings and these arguments."""
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    return not name.startswith("aten::cumsum") or tensors[0].is_floating_point()


def computes(operator: Any, name: str) -> bool:
    """Return whether an operator starts a kernel: views and allocations do not."""
    if name in NO_KERNEL or not name.startswith("aten::"):
        return False
    aliases = [value.alias_info for value in operator._schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)


def find_wait(name: str, args: Any, options: dict[str, Any]) -> str:
    """Return what makes the host wait in a call of an operator on the device, or ""."""
    if name == "aten::_local_scalar_dense":
        return "item"
    if name in SIZES_UNKNOWN:
        return name.removeprefix("aten::")
    if name == "aten::equal":
        return "equal"
    if name == "aten::repeat_interleave" and options.get("output_size") is None:
        return "repeat_interleave without output_size"
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            return "boolean index"
        return "index on the host" if any(x.device.type == "cpu" for x in indices) else ""
    if name == "aten::_to_copy":
        to = options.get("device")
        to_type = args[0].device.type if to is None else torch.device(to).type
        return describe_copy(args[0], to_type, bool(options.get("non_blocking")), pinned=True)
    if name == "aten::copy_":
        blocking = not (args[2] if len(args) > 2 else options.get("non_blocking", False))
        return describe_copy(args[1], args[0].device.type, not blocking, pinned=args[0].is_pinned())
    return ""


def describe_copy(source: Tensor, to: str, non_blocking: bool, pinned: bool) -> str:
    """Return why a copy between devices makes the host wait, or "". pinned: of the target, if it is on the host."""
    if source.device.type == to:
        return ""
    ways = "device to host" if to == "cpu" else "host to device"
    if not non_blocking:
        return f"{ways}, blocking"
    return "" if (pinned if to == "cpu" else source.is_pinned()) else f"{ways}, not pinned"


def note_wait(what: str) -> None:
    """Count a wait outside of an operator, such as a synchronisation of a stream."""
    for watch in _active[-1:]:
        watch.waits[f"{what} at {find_place()}"] += 1


def note_kernel(name: str) -> None:
    """Count a call of a Triton kernel."""
    for watch in _active[-1:]:
        watch.kernels[name] += 1


def find_place() -> str:
    """Return "file:function" of the innermost frame in a package of gangline; "backward" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        _, source, module = frame.f_code.co_filename.rpartition("/src/gangline")
        if source and not module.startswith("_testkit/"):
            return f"gangline{module}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward"
