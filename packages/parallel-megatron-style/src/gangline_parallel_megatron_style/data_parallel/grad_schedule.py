"""Which sums of gradients are under way, and when each is waited for."""

from __future__ import annotations

from collections.abc import Sequence

from gangline_parallel_megatron_style.data_parallel.grad_buffer import GradBuffer


class GradSchedule:
    """Sums over ranks follow each other as the backward pass goes through the modules.

    Those of the module before have had as long to arrive as this module's backward pass takes: they are waited for when
    it ends, so that the gradients of no more than two modules are whole at a time. After their last microbatch they are
    then added over the replicas, and those for which that began before are waited for.
    """

    def __init__(self) -> None:
        self._reducing: list[tuple[GradBuffer, bool]] = []  # and whether in the last microbatch
        self._crossing: list[GradBuffer] = []

    def clear(self) -> None:
        """Forget what a step that failed has left."""
        self._reducing, self._crossing = [], []

    def reduce(self, buffers: Sequence[GradBuffer], last: bool) -> None:
        """The backward pass of a module has ended: begin to add its gradients over the ranks.

        last: in its last microbatch everything is added; else only what may not stay (`each_microbatch`).
        """
        due_buffers = [buffer for buffer in buffers if last or buffer.each_microbatch]
        for buffer in due_buffers:
            buffer.reduce_scatter()
        self._advance([(buffer, last) for buffer in due_buffers])

    def _advance(self, behind: list[tuple[GradBuffer, bool]]) -> None:
        before, self._reducing = self._reducing, behind
        for buffer, _ in before:
            buffer.wait_reduce_scatter()
        crossed, self._crossing = self._crossing, [buffer for buffer, last in before if last]
        for buffer in self._crossing:
            buffer.all_reduce_replicas()
        for buffer in crossed:
            buffer.wait_all_reduce()

    def finish(self) -> None:
        """Wait for all sums."""
        while self._reducing or self._crossing:
            self._advance([])
