"""DualPipeV schedule: forwards of one chunk overlap with backwards of the other, which hides communication."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from gangline_parallel_megatron_style.pipeline.actions import PipelineAction, Schedule, truncate_schedule


class _Order:
    """One rank's list of actions under construction, with the next microbatch of each chunk."""

    def __init__(self) -> None:
        self.actions: list[PipelineAction] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.deferred: deque[PipelineAction] = deque()
        self.pairs: list[tuple[PipelineAction, PipelineAction]] = []

    def forward(self, chunk: int) -> None:
        self.actions.append(PipelineAction("F", chunk, self.forwards[chunk]))
        self.forwards[chunk] += 1

    def backward(self, chunk: int, split: bool = False) -> None:
        microbatch = self.backwards[chunk]
        self.backwards[chunk] += 1
        self.actions.append(PipelineAction("I" if split else "B", chunk, microbatch))
        if split:
            self.deferred.append(PipelineAction("W", chunk, microbatch))

    def add_pair(self, chunk: int) -> None:
        """Add a forward of `chunk` that overlaps with a backward of the other chunk."""
        self.forward(chunk)
        self.backward(1 - chunk)
        self.pairs.append((self.actions[-2], self.actions[-1]))

    def add_deferred(self) -> None:
        self.actions.append(self.deferred.popleft())


def make_dualpipe_v_schedule(ranks: int, microbatches: int) -> Schedule:
    """Make the DualPipeV schedule: two chunks a rank, as a V; a forward of one overlaps with a backward of the other.

    DeepSeek-V3, arXiv 2412.19437, section 3.2.1: DualPipe; its half with one copy of each weight is DualPipeV ("cut in
    half"). Idle time of each rank, by the paper's table: (p - 1)(F&B + B - 3W), with times of one chunk, if m >= 2p.
    B = I + W, and F&B is the time of a forward and a backward that overlap (`Schedule.pairs`). Without pairs the
    forward and the backward run one after the other, and the backward does not wait for the forward of its pair: the
    idle time is then (p - 1)(F + I - W). Peak activations: at most 2p + 1, each of one microbatch in one chunk.
    """
    full = max(microbatches, 2 * ranks)

    def order(rank: int) -> _Order:
        above, o = ranks - 1 - rank, _Order()
        for _ in range(2 * above):
            o.forward(0)
        for _ in range(rank + 1):
            o.forward(0)
            o.forward(1)
        for _ in range(above):
            o.backward(1, split=True)
            o.add_deferred()
            o.forward(1)
        for _ in range(full - 2 * ranks + rank + 1):
            o.add_pair(0)
            o.add_pair(1)
        for _ in range(above):
            o.backward(1)
            o.add_pair(1)
        # The second half of the remaining backwards is split: deferred weight gradients fill the idle time at the end.
        for number in range(2 * (rank + 1)):
            o.backward(1 - number % 2, split=number > rank)
        for _ in range(above):
            o.add_deferred()
            o.backward(0, split=True)
        while o.deferred:
            o.add_deferred()
        return o

    orders = [order(rank) for rank in range(ranks)]
    schedule = truncate_schedule(ranks, microbatches, 2, "v", lambda rank: orders[rank].actions)
    there = {(rank, action) for rank, actions in enumerate(schedule.actions) for action in actions}
    pairs = {(rank, f) for rank, o in enumerate(orders) for f, b in o.pairs if {(rank, f), (rank, b)} <= there}
    return replace(schedule, pairs=frozenset(pairs))
