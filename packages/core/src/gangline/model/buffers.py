"""Buffers of a model; a buffer that several modules have registered occurs once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from gangline.model.contracts import StepListener
from gangline.plan import Plan


@dataclass(frozen=True)
class Buffer:
    """One buffer. names: the buffer's names in all modules. saved_name: name in checkpoints; None: not persistent."""

    tensor: Tensor
    names: tuple[str, ...]
    saved_name: str | None


def iterate_buffers(model: nn.Module) -> Iterator[Buffer]:
    """Yield the buffers in the order of the modules; a persistent buffer is saved under its first persistent name."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    persistent = model.state_dict().keys()
    for key, tensor in tensors.items():
        yield Buffer(tensor, tuple(names[key]), next((name for name in names[key] if name in persistent), None))


def list_filled_buffers(model: nn.Module) -> list[Buffer]:
    """Return the buffers. Raises ValueError for a meta-device buffer that neither checkpoint nor init fills."""
    buffers = list(iterate_buffers(model))
    for buffer in buffers:
        if buffer.tensor.is_meta and buffer.saved_name is None:
            raise ValueError(
                f"the buffer {buffer.names[0]} is not persistent, so neither initialization nor checkpoints fill it: "
                "compute the buffer in forward, or register it as persistent"
            )
    return buffers


def iterate_listeners(module: nn.Module, path: str, plan: Plan) -> Iterator[tuple[str, StepListener]]:
    """Yield (path, submodule) for the submodules with an `after_step` in `module`, which is at `path`.

    Skips a module whose buffers are all frozen: `after_step` would change them.
    """
    for inner, one in module.named_modules(prefix=path):
        state = [f"{inner}.{name}" if inner else name for name, _ in one.named_buffers()]
        if isinstance(one, StepListener) and (not state or not all(plan.is_frozen(name) for name in state)):
            yield inner, one


def put(model: nn.Module, buffer: Buffer, tensor: Tensor) -> None:
    """Replace the buffer by `tensor` in all modules that registered the buffer."""
    for name in buffer.names:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, tensor)
