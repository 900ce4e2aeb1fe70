"""One chunk of the model on this rank: the modules it runs, in order, and what happens around each of them.

    embed?  block  block ...  head?        each with the groups whose weights it reads

Before a module its groups are gathered (and the next ones ahead of it); when the backward pass is through with it, its
gradients are on their way. The way back is noticed by an identity in front of each module: its backward runs when all
that the module's own backward does is done, for autograd takes what was made last first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from gangline.batch import Batch


@dataclass(frozen=True)
class Segment:
    """A module of the chunk. kind: "embed" (batch) -> hidden, "block" and "head" (hidden, batch) -> hidden or loss.

    groups    whose weights it reads
    reduces  whose gradients are complete when its backward pass is done
    """

    kind: str
    module: nn.Module
    groups: tuple[str, ...]
    reduces: tuple[str, ...]


class _Passing(torch.autograd.Function):
    """hidden -> hidden; `passed()` is called when the gradient comes by."""

    @staticmethod
    def forward(ctx, hidden: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.passed()
        return grad, None


def passing(hidden: Tensor, passed: Callable[[], None]) -> Tensor:
    """`hidden`, with a call when its gradient comes by."""
    return _Passing.apply(hidden, passed) if hidden.requires_grad else hidden


class Stage:
    """Runs its segments. `before(segment, backward)` and `after(segment, backward)` are called around each of them."""

    def __init__(
        self, segments: list[Segment], before: Callable[[Segment, bool], None], after: Callable[[Segment, bool], None]
    ) -> None:
        self.segments, self.before, self.after = segments, before, after
        self._unnoticed: dict[int, list[Segment]] = {}  # by microbatch: segments whose way back nobody comes by

    def forward(self, microbatch: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """The hidden state behind the last segment, or the loss."""
        unnoticed = []
        for segment in self.segments:
            if hidden is None or not hidden.requires_grad:
                unnoticed.append(segment)  # the embedding, and what stands behind one that is not trained
            else:
                hidden = passing(hidden, partial(self.after, segment, True))
            self.before(segment, False)
            hidden = segment.module(batch) if hidden is None else segment.module(hidden, batch)
            self.after(segment, False)
            hidden = passing(hidden, partial(self.before, segment, True))
        assert hidden is not None
        if torch.is_grad_enabled():
            self._unnoticed[microbatch] = unnoticed
        return hidden

    def backward_ends(self, microbatch: int) -> None:
        """The backward pass of this chunk and microbatch is done."""
        for segment in reversed(self._unnoticed.pop(microbatch)):
            self.after(segment, True)
