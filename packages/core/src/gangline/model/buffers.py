"""The buffers of a model, each once, whatever number of modules have registered it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from gangline.model.contracts import StepListener
from gangline.plan import Plan


@dataclass(frozen=True)
class Buffer:
    """One buffer. names: all under which modules have it. kept: the one it is saved under, None if it is not state."""

    tensor: Tensor
    names: tuple[str, ...]
    kept: str | None


def iterate_buffers(model: nn.Module) -> Iterator[Buffer]:
    """The buffers in the order of the modules; a persistent one is kept under the first of its persistent names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    persistent = model.state_dict().keys()
    for key, tensor in tensors.items():
        yield Buffer(tensor, tuple(names[key]), next((name for name in names[key] if name in persistent), None))


def list_filled_buffers(model: nn.Module) -> list[Buffer]:
    """The same. Raises ValueError for one on the meta device that no checkpoint and no first values fill."""
    buffers = list(iterate_buffers(model))
    for buffer in buffers:
        if buffer.tensor.is_meta and buffer.kept is None:
            raise ValueError(
                f"the buffer {buffer.names[0]} is not persistent, so nothing fills it: compute it in forward or let it "
                "persist"
            )
    return buffers


def iterate_listeners(module: nn.Module, path: str, plan: Plan) -> Iterator[tuple[str, StepListener]]:
    """The modules in `module` (which lies at `path`) that have an `after_step`, with their paths.

    One whose buffers are all frozen is not: it would move what the plan says stays as it is.
    """
    for inner, one in module.named_modules(prefix=path):
        state = [f"{inner}.{name}" if inner else name for name, _ in one.named_buffers()]
        if isinstance(one, StepListener) and (not state or not all(plan.is_frozen(name) for name in state)):
            yield inner, one


def put(model: nn.Module, buffer: Buffer, tensor: Tensor) -> None:
    """Let all modules that have the buffer have `tensor` instead."""
    for name in buffer.names:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, tensor)
