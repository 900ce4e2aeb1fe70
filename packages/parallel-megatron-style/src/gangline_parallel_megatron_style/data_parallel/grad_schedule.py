"""Schedule of gradient reductions: which reductions are pending, and when the rank waits for each."""

from __future__ import annotations

from collections.abc import Sequence

from gangline_parallel_megatron_style.data_parallel.grad_buffer import GradBuffer


class GradSchedule:
    """Gradient reductions of a rank, in the order in which the backward pass goes through the modules.

    Each module's reduction overlaps with the backward pass of the next module and is waited for when that backward pass
    ends, so at most two modules have full gradients at a time. In the last microbatch the module's sums are then
    all-reduced over the replicas, after a wait for the previous module's all-reduce.
    """

    def __init__(self) -> None:
        self._reducing: list[tuple[GradBuffer, bool]] = []  # (buffer, whether the microbatch is the last)
        self._crossing: list[GradBuffer] = []

    def clear(self) -> None:
        """Drop the pending reductions of a failed step."""
        self._reducing, self._crossing = [], []

    def reduce(self, buffers: Sequence[GradBuffer], last: bool) -> None:
        """Start to reduce the gradients of a module over the ranks. Call after the module's backward pass.

        last: whether this is the last microbatch, which reduces every buffer; earlier microbatches reduce only buffers
        with `each_microbatch`
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
        """Wait for all pending reductions."""
        while self._reducing or self._crossing:
            self._advance([])
