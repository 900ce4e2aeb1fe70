"""Programs of the ranks, from a schedule: actions and the transfers between them, in an order that cannot deadlock.

All transfers and actions of all ranks are put into one sequence: actions by their simulated end, and each transfer
right after the action that made its contents. A rank's program holds that rank's entries, in the order of this
sequence. So the rank with the first remaining entry can always continue, even if each rank runs its transfers strictly
one after another and a sender waits for its receiver (NCCL with one communicator, no buffers). A rank starts a
receive before the action that it runs while the sender computes, so the receive is pending while the rank is busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from gangline_basics.explain.timeline import ActionTimes
from gangline_parallel_megatron_style.pipeline.action_times import UNIFORM
from gangline_parallel_megatron_style.pipeline.actions import Kind, PipelineAction, Schedule
from gangline_parallel_megatron_style.pipeline.dependencies import get_result, list_needs
from gangline_parallel_megatron_style.pipeline.simulate import Timeline, simulate


class Message(NamedTuple):
    """A transfer between two neighbouring pipeline stages."""

    what: Kind  # "F": a hidden state for the next stage; "B": a hidden state's gradient for the previous stage
    microbatch: int
    source: int  # index of the sending stage
    target: int  # index of the receiving stage


class RunAction(NamedTuple):
    """An action to run. `beside`: a backward that overlaps with the action, or None."""

    action: PipelineAction
    beside: PipelineAction | None = None


class Send(NamedTuple):
    message: Message
    peer: int  # receiving rank


class Recv(NamedTuple):
    """Start to receive a message that a later `RunAction` needs.

    frees: number of messages from this rank to `peer`, counted from the first, that must have arrived before `peer`
    could make this message. After this message arrives, this rank may free those messages.
    """

    message: Message
    peer: int
    frees: int


Step = RunAction | Send | Recv
Program = tuple[Step, ...]


def find_output_message(schedule: Schedule, rank: int, action: PipelineAction) -> Message | None:
    """Return the message with an action's result for another stage, on any rank; None if no stage needs the result."""
    stage_result = get_result(schedule, rank, action)
    if stage_result is None:
        return None
    target = stage_result.stage + (1 if stage_result.what == "F" else -1)
    return (
        Message(stage_result.what, stage_result.microbatch, stage_result.stage, target)
        if 0 <= target < schedule.stages
        else None
    )


def find_input_message(schedule: Schedule, rank: int, action: PipelineAction) -> Message | None:
    """Return the message with the result that an action needs from another stage, on any rank; None without one."""
    stage = schedule.get_stage(rank, action.chunk)
    stage_result = next((need for need in list_needs(schedule, rank, action) if need.stage != stage), None)
    return (
        None if stage_result is None else Message(stage_result.what, stage_result.microbatch, stage_result.stage, stage)
    )


def build_programs(
    schedule: Schedule, times: ActionTimes | Sequence[ActionTimes] = UNIFORM, latency: float = 0.0
) -> tuple[Program, ...]:
    """Return the program of each rank; stages on the same rank exchange no messages.

    `times` and `latency` only choose among correct orders; both must be equal on all ranks.
    """
    steps: list[list[Step]] = [[] for _ in range(schedule.ranks)]
    messages: dict[tuple[int, int], list[Message]] = defaultdict(list)  # (sending rank, receiving rank) -> messages
    freed: dict[tuple[int, int], int] = defaultdict(int)
    used_messages: set[Message] = set()
    for ending_together in _group_by_end(simulate(schedule, times, latency)):
        transfers: list[tuple[Message, int, int, int]] = []
        for rank, turn in ending_together:
            steps[rank].append(RunAction(*turn))
            used_messages.update(
                input_message
                for action in turn
                if (input_message := find_input_message(schedule, rank, action)) is not None
            )
            for message in filter(None, (find_output_message(schedule, rank, action) for action in turn)):
                peer = schedule.get_place(message.target)[0]
                if peer == rank:
                    continue
                back = (peer, rank)
                while freed[back] < len(messages[back]) and messages[back][freed[back]] in used_messages:
                    freed[back] += 1
                transfers.append((message, rank, peer, freed[back]))
        for message, rank, peer, frees in transfers:
            steps[rank].append(Send(message, peer))
            steps[peer].append(Recv(message, rank, frees))
            messages[rank, peer].append(message)
    return tuple(map(tuple, steps))


def _group_by_end(timeline: Timeline) -> Iterator[list[tuple[int, tuple[PipelineAction, ...]]]]:
    """Yield, in order of time, the list of (rank, turn) of all turns that end at the same time."""
    events = []
    for rank, spans in enumerate(timeline.spans):
        ends = iter(end for _, end in spans)
        events += [([next(ends) for _ in turn][-1], rank, turn) for turn in timeline.schedule.iterate_turns(rank)]
    for _, together in groupby(sorted(events), key=lambda event: event[0]):
        yield [(rank, turn) for _, rank, turn in together]
