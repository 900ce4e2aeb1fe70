"""Optional methods and attributes of a model's modules, and their callers.

bind(axis)             called once by the strategy if a parameter of the module is sharded along an axis or a fold
set_precision(precision) called once by the strategy, before the first matmul of a module that is not a `Linear`
after_step(totals)     called by the runtime after each step of the optimizer
attention, loss        functions at a seam of the plan, which a strategy may replace
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

if TYPE_CHECKING:
    from gangline.comm.base import Comm
    from gangline.precision import Precision


@runtime_checkable
class Bindable(Protocol):
    """A module that can compute with a shard of its parameters."""

    def bind(self, axis: Comm) -> None:
        """Store `axis`: the Comm of the ranks that hold the shards of the module's parameters."""
        ...


@runtime_checkable
class OwnMatmuls(Protocol):
    """A module that computes its own matmuls, without a `Linear`."""

    def set_precision(self, precision: Precision) -> None:
        """Compute later matmuls with `precision.linear`."""
        ...


@runtime_checkable
class StepListener(Protocol):
    """A module that updates its buffers after each step from emitted metrics, such as the bias of a router."""

    def after_step(self, totals: dict[str, Tensor]) -> None:
        """Update the buffers.

        totals: metrics that the module's block emitted, by name, in float64, reduced over all ranks and microbatches
        of the step.
        """
        ...


def bind_linear(linear: nn.Module, path: str, comm: Comm, bound: set[str]) -> None:
    """Pass `comm` to a sharded linear if its wrapper is `Bindable`, unless `path` is in `bound`; add it to `bound`.

    A strategy shards a linear itself; an adapter around it may need to know which features this rank holds.
    """
    if isinstance(linear, Bindable) and path not in bound:
        bound.add(path)
        linear.bind(comm)


def bind_around(model: nn.Module, name: str, axis: str, comm: Comm, bound: set[str]) -> None:
    """Pass `comm` to the nearest `Bindable` around the parameter `name`, unless the module's path is in `bound`.

    Adds the path to `bound`. axis: name of the sharding axis, for the error. Raises TypeError without a `Bindable`.
    """
    path = name
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        if isinstance(module, Bindable):
            if path not in bound:
                bound.add(path)
                module.bind(comm)
            return
    raise TypeError(f"{name} is sharded along {axis}, but no module around it has a method `bind(axis)`")


def get_seam_function(module: nn.Module, seam: str) -> Callable[..., Any] | None:
    """Return the function that `module` calls at this seam; None if it has no such function.

    A block has no function at the seam: its attribute `attention` is the attention layer.
    """
    attribute = getattr(module, seam, None)
    return None if isinstance(attribute, nn.Module) else attribute


def get_seam_module(module: nn.Module, seam: str) -> nn.Module | None:
    """Return the module that `module` calls at this seam instead of a function; None if it has no such module.

    A layer that contains the seam does not count.
    """
    attribute = getattr(module, seam, None)
    if not isinstance(attribute, nn.Module) or any(hasattr(inside, seam) for inside in attribute.modules()):
        return None
    return attribute
