"""One stage of the model on this rank: the modules it runs, in order, with callbacks around each module.

    embed?  block  block ...  head?        each with the parameter groups whose weights it reads

Before a module its groups are unsharded, and the next ones prefetched; when its backward pass has ended, its gradients
are reduced. An identity before each module marks its backward's end: autograd runs in reverse order, so the identity's
backward runs when the module's own is done.
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

    groups    parameter groups whose weights it reads
    reduces   parameter groups whose gradients are complete after its backward pass
    """

    kind: str
    module: nn.Module
    groups: tuple[str, ...]
    reduces: tuple[str, ...]


class _Passing(torch.autograd.Function):
    """Autograd identity hidden -> hidden whose backward calls `passed()`."""

    @staticmethod
    def forward(ctx, hidden: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.passed()
        return grad, None


def call_in_backward(hidden: Tensor, passed: Callable[[], None]) -> Tensor:
    """Return `hidden` behind an identity whose backward calls `passed()`: after its users', before its producer's."""
    return _Passing.apply(hidden, passed) if hidden.requires_grad else hidden


class Stage:
    """The segments of a stage. `before(segment, backward)` and `after(segment, backward)` are called around each."""

    def __init__(
        self, segments: list[Segment], before: Callable[[Segment, bool], None], after: Callable[[Segment, bool], None]
    ) -> None:
        self.segments, self.before, self.after = segments, before, after
        self.writes = False  # whether the head returns logits of the next token of each row, not the loss
        self._unmarked: dict[int, list[Segment]] = {}  # by microbatch: segments with no identity before them

    def forward(self, microbatch: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Return the hidden state after the last segment, or the loss, or this rank's logits (B, V)."""
        unmarked = []
        for segment in self.segments:
            if hidden is None or not hidden.requires_grad:
                unmarked.append(segment)  # the embedding, and segments after a frozen one
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
        """End the backward pass of a microbatch: call `after` for the segments that no identity marks."""
        for segment in reversed(self._unmarked.pop(microbatch)):
            self.after(segment, True)
