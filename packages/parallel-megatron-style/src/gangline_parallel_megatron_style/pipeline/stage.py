"""One stage of the model on this rank: the modules it runs, in order, and what is called around each of them.

    embed?  block  block ...  head?        each with the parameter groups whose weights it reads

Before a module its groups are unsharded, and the next ones prefetched; when its backward pass has ended, its gradients
are reduced. An identity before each module marks its backward's end: autograd runs what was made last first, so the
identity's backward runs when the module's own is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gangline.batch import Batch


@dataclass(frozen=True)
class Segment:
    """A module of a stage. kind: "embed" (batch) -> hidden, "block" and "head" (hidden, batch) -> hidden or loss.

    groups    whose weights it reads
    reduces  whose gradients are complete when its backward pass is done
    """

    kind: str
    module: nn.Module
    groups: tuple[str, ...]
    reduces: tuple[str, ...]


class _Passing(torch.autograd.Function):
    """hidden -> hidden; its backward calls `passed()`."""

    @staticmethod
    def forward(ctx, hidden: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.passed()
        return grad, None


def call_in_backward(hidden: Tensor, passed: Callable[[], None]) -> Tensor:
    """`hidden`, with `passed()` called in the backward pass, between what is made of it and what it is made of."""
    return _Passing.apply(hidden, passed) if hidden.requires_grad else hidden


class Stage:
    """Runs its segments. `before(segment, backward)` and `after(segment, backward)` are called around each of them."""

    def __init__(
        self, segments: list[Segment], before: Callable[[Segment, bool], None], after: Callable[[Segment, bool], None]
    ) -> None:
        self.segments, self.before, self.after = segments, before, after
        self.writes = False  # the head gives the logits of what follows each row's last token, not the loss
        self._unmarked: dict[int, list[Segment]] = {}  # by microbatch: segments with no identity before them

    def forward(self, microbatch: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """The hidden state behind the last segment, or the loss, or logits (B, V) of this rank."""
        unmarked = []
        for segment in self.segments:
            if hidden is None or not hidden.requires_grad:
                unmarked.append(segment)  # the embedding, and what stands behind one that is not trained
            else:
                hidden = call_in_backward(hidden, partial(self.after, segment, True))
            self.before(segment, False)
            hidden = self._run(segment, hidden, batch)
            self.after(segment, False)
            hidden = call_in_backward(hidden, partial(self.before, segment, True))
        assert hidden is not None
        if torch.is_grad_enabled():
            self._unmarked[microbatch] = unmarked
        return hidden

    def _run(self, segment: Segment, hidden: Tensor | None, batch: Batch) -> Tensor:
        if hidden is None:
            return segment.module(batch)
        if segment.kind == "head" and self.writes:
            head: Any = segment.module
            return head.compute_logits(hidden[:, -1:])[:, -1]
        return segment.module(hidden, batch)

    def end_backward(self, microbatch: int) -> None:
        """The backward pass of this stage and microbatch is done."""
        for segment in reversed(self._unmarked.pop(microbatch)):
            self.after(segment, True)
