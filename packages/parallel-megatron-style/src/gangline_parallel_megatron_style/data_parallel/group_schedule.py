"""Schedule of parameter groups: the times to unshard and reshard weights, and to reduce gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gangline.model.weight_grads import is_deferring
from gangline_parallel_megatron_style.data_parallel.storage import Storage
from gangline_parallel_megatron_style.pipeline.stage import Segment


class GroupSchedule:
    """Callbacks before and after each module of a rank's stages, in forward and backward passes.

    stages    the segments of each stage on this rank, in order
    prefetch  number of modules after the current module whose weights are unsharded in advance
    last      whether the current backward pass belongs to the last microbatch of the step
    """

    def __init__(self, storage: Storage, stages: Sequence[list[Segment]], prefetch: int) -> None:
        self._storage, self._prefetched = storage, prefetch
        self._stage_of = {segment: segments for segments in stages for segment in segments}
        self.last = False

    def begin_segment(self, segment: Segment, backward: bool) -> None:
        """Wait for the weights of a module that is about to run, and start to unshard the next modules' weights."""
        if backward and segment.kind == "embed":
            return  # the backward pass of an embedding lookup needs no weights
        for group in segment.groups:
            for buffer in self._storage.groups[group]:
                buffer.wait_unshard()
        self._prefetch(segment, -1 if backward else 1)

    def _prefetch(self, segment: Segment, step: int) -> None:
        segments = self._stage_of[segment]
        at = segments.index(segment)
        for ahead in range(1, self._prefetched + 1):
            other = at + step * ahead
            if 0 <= other < len(segments) and (step > 0 or segments[other].kind != "embed"):
                for group in segments[other].groups:
                    for buffer in self._storage.groups[group]:
                        buffer.unshard()

    def end_segment(self, segment: Segment, backward: bool) -> None:
        """Reshard a module's weights, unless its backward pass is next. After a backward pass, reduce its gradients.

        Deferred weight gradients are reduced later.
        """
        if backward and not is_deferring():
            self.reduce(segment)
        if backward or not (torch.is_grad_enabled() and self._is_needed_next(segment)):
            for group in segment.groups:
                for buffer in self._storage.groups[group]:
                    buffer.reshard()

    def _is_needed_next(self, segment: Segment) -> bool:
        """Return whether the backward pass begins with this segment or prefetches it first; False without a head."""
        segments = self._stage_of[segment]
        end = len(segments) - 1
        return segments[end].kind == "head" and segments.index(segment) >= end - self._prefetched

    def reduce(self, segment: Segment) -> None:
        """Start to reduce the gradients of the groups that are complete after this module's backward pass."""
        self._storage.reduce(segment.reduces, last=self.last)
