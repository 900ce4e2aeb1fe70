"""One pipeline stage of the model on this rank: the modules it runs, in order, with callbacks around each module.

    embed?  block  block ...  head?        each with the parameter groups whose weights it reads

Before a module runs, its parameter groups are unsharded and the next modules' groups are prefetched; after its backward
pass, its gradients are reduced. An identity before each module marks the end of the module's backward pass: autograd
runs in reverse order, so the backward of the identity runs after the backward of the module.
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
    """A module of a pipeline stage.

    kind      "embed": (batch) -> hidden; "block": (hidden, batch) -> hidden; "head": (hidden, batch) -> loss
    groups    parameter groups whose weights the module reads
    reduces   parameter groups whose gradients are complete after the module's backward pass
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
    """Return `hidden` through an identity whose backward calls `passed()`.

    The call comes after the backward of the modules that read the result, and before the backward of the module that
    made `hidden`. Without a gradient `hidden` is returned unchanged.
    """
    return _Passing.apply(hidden, passed) if hidden.requires_grad else hidden


class Stage:
    """The segments of a pipeline stage, with callbacks around the forward and the backward pass of each segment.

    before, after: functions (segment, whether in the backward pass)
    """

    def __init__(
        self, segments: list[Segment], before: Callable[[Segment, bool], None], after: Callable[[Segment, bool], None]
    ) -> None:
        self.segments, self.before, self.after = segments, before, after
        self.writes = False  # text generation: whether the head returns logits of each row's next token, not the loss
        self._unmarked: dict[int, list[Segment]] = {}  # microbatch -> segments without an identity before them

    def forward(self, microbatch: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Run the segments; return the hidden state, or after the head the loss or this rank's logits (B, V)."""
        unmarked = []
        for segment in self.segments:
            if hidden is None or not hidden.requires_grad:
                unmarked.append(segment)  # the embedding, and segments after a frozen embedding
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
        """End the backward pass of a microbatch: call `after` for the segments without an identity before them."""
        for segment in reversed(self._unmarked.pop(microbatch)):
            self.after(segment, True)
