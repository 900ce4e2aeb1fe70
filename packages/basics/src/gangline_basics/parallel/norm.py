"""Global gradient norm, and clipping by the norm.

Under `run.deterministic` squares are summed in float64, first per row, then per parameter. The sum is then the same for
any distribution of the rows over ranks. (A sum over a full tensor would differ from a sum over its pieces.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def sum_row_squares(gradient: Tensor) -> Tensor:
    """Sum squares over the last dim, (rows,) in float64; an array of at most one dim is one row."""
    rows = gradient.reshape(-1, gradient.shape[-1]) if gradient.dim() > 1 else gradient.reshape(1, -1)
    return rows.double().square().sum(-1)


def compute_norm(squares: Sequence[Tensor]) -> Tensor:
    """Return the norm, 0-d, float64, from the `sum_row_squares` of all rows of each parameter, in order of names."""
    return torch.stack([rows.sum() for rows in squares]).sum().sqrt()


def compute_global_norm(gradients: Sequence[Tensor], deterministic: bool) -> Tensor:
    """Return the norm of unsharded gradients of this rank, 0-d; nan or inf if a gradient is not finite."""
    if deterministic:
        return compute_norm([sum_row_squares(gradient) for gradient in gradients])
    return get_total_norm(gradients)


def clip(parameters: Sequence[Tensor], max_norm: float, norm: Tensor, value: float) -> None:
    """Scale `.grad` so that the global norm is at most `max_norm`. norm: global norm on the device; value: on the host.

    If the norm is below `max_norm`, torch would multiply all gradients by 1, so this function skips the multiplication.
    A margin ensures that rounding cannot change the result.
    """
    if value > max_norm * (1 - 1e-5):
        clip_grads_with_norm_(parameters, max_norm, norm.to(parameters[0].dtype))


class MeasuredNorm:
    """Global norm of the gradients of a runtime's leaf tensors: measured in `step`, checked for staleness in `clip`.

    leaves        (parameter name, leaf tensor) of this rank
    measure_norm  function that returns the global norm of the leaves' `.grad`, 0-d, equal on all ranks
    is_local      whether `measure_norm` needs no other rank, so that this rank may measure again by itself

    `clip` detects a stale norm by the identity and the version counter of every `.grad`. Writes through `.data`, NumPy
    or a custom kernel do not increase the version counter, so call `discard` after such a write.
    """

    def __init__(
        self, leaves: Sequence[tuple[str, Tensor]], measure_norm: Callable[[], Tensor], is_local: bool
    ) -> None:
        self._names, self._leaves = [name for name, _ in leaves], [leaf for _, leaf in leaves]
        self._measure_norm, self._is_local = measure_norm, is_local
        self._measured: tuple[list[Tensor | None], list[int]] | None = None
        self._norm = torch.zeros(())
        # norm on the host; None until a runtime or `clip` has copied it from the device
        self.value: float | None = None

    def discard(self) -> None:
        """Drop the norm and release the gradients; the next `clip` measures again. All ranks must call `discard`."""
        self._measured, self.value = None, None

    def measure(self) -> Tensor:
        """Measure the norm of the current gradients, and return it, 0-d, on the device."""
        self._norm, self.value = self._measure_norm(), None
        gradients = [leaf.grad for leaf in self._leaves]
        self._measured = gradients, _list_versions(gradients)
        return self._norm

    def clip(self, max_norm: float | None) -> float:
        """Scale the gradients so that their norm is at most `max_norm`, and return the norm before clipping.

        Raises RuntimeError if a gradient was written since it was measured and other ranks are needed to measure again.
        """
        if self._measured is None:
            self.measure()
        elif (name := self._find_first_change()) is not None:
            if not self._is_local:
                raise RuntimeError(
                    f"The gradient of {name} was written after the norm was measured, so clip would use a stale norm. "
                    "Call Runtime.remeasure() on all ranks after writing to `.grad`, or write in Callback.before_clip."
                )
            self.measure()
        value = float(self._norm) if self.value is None else self.value
        if max_norm is not None and self._leaves:
            clip(self._leaves, max_norm, self._norm, value)
        self.discard()
        return value

    def _find_first_change(self) -> str | None:
        assert self._measured is not None
        measured, versions = self._measured
        gradients = [leaf.grad for leaf in self._leaves]
        if all(map(operator.is_, gradients, measured)) and _list_versions(gradients) == versions:
            return None
        changes = zip(self._names, gradients, measured, _list_versions(gradients), versions, strict=True)
        return next(name for name, now, then, version, before in changes if now is not then or version != before)


def _list_versions(gradients: Sequence[Tensor | None]) -> list[int]:
    return [-1 if gradient is None else gradient._version for gradient in gradients]
