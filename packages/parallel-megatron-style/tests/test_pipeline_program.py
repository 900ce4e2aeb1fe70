"""Send and receive programs of all ranks without send buffers: no deadlock, bounded memory, in order."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings, strategies as st

from gangline_basics.explain.timeline import ActionTimes
from gangline_parallel_megatron_style.pipeline.actions import PipelineAction
from gangline_parallel_megatron_style.pipeline.program import (
    Message,
    Recv,
    RunAction,
    Send,
    build_programs,
    find_input_message,
    find_output_message,
)
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES, make_forward_schedule, make_schedule


@st.composite
def schedules(draw):
    name = draw(st.sampled_from([*sorted(SCHEDULES), "forward_only"]))
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 16))
    if name == "forward_only":
        return make_forward_schedule(ranks, microbatches, *draw(st.sampled_from([(1, "loop"), (3, "loop"), (2, "v")])))
    chunks = draw(st.integers(1, 3)) if SCHEDULES[name].free_chunks else None
    return make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks, overlap=draw(st.booleans()))


class Rendezvous:
    """Model of ranks that run their programs in order; a transfer happens when both ends have reached it."""

    def __init__(self, schedule, steps):
        self.schedule, self.steps = schedule, steps
        self.at = [0] * schedule.ranks
        self.here: list[set[Message]] = [set() for _ in steps]  # outputs that each rank has computed or received
        self.received: dict[tuple[int, int], int] = defaultdict(int)
        self.used: list[list[Message]] = [[] for _ in steps]
        self.order: dict[tuple[int, int], list[Message]] = defaultdict(list)

    def now(self, rank):
        return self.steps[rank][self.at[rank]] if self.at[rank] < len(self.steps[rank]) else None

    def run(self, rank, *actions):
        for action in actions:
            needed = find_input_message(self.schedule, rank, action)
            if needed is not None:
                assert needed in self.here[rank], f"rank {rank} runs {action} before it has {needed}"
                self.used[rank].append(needed)
        for action in actions:
            made = find_output_message(self.schedule, rank, action)
            if made is not None:
                self.here[rank].add(made)

    def transfer(self, rank, step):
        peer, other = step.peer, self.now(step.peer)
        if not (isinstance(other, Recv) and other.peer == rank):
            return False
        assert other.message == step.message, f"rank {rank} sends {step.message}, rank {peer} expects {other.message}"
        assert step.message in self.here[rank], f"rank {rank} sends {step.message} before it is made"
        self.here[peer].add(step.message)
        self.order[rank, peer].append(step.message)
        earlier = self.order[peer, rank]
        assert other.frees <= len(earlier)
        assert set(earlier[: other.frees]) <= set(self.used[rank]), "freed before the peer had used it"
        self.at[rank] += 1
        self.at[peer] += 1
        return True

    def carry_out(self):
        moved = True
        while moved:
            moved = False
            for rank in range(self.schedule.ranks):
                step = self.now(rank)
                if isinstance(step, RunAction):
                    self.run(rank, *filter(None, step))
                    self.at[rank] += 1
                    moved = True
                elif isinstance(step, Send):
                    moved = self.transfer(rank, step) or moved
        stuck = {rank: self.now(rank) for rank in range(self.schedule.ranks) if self.now(rank) is not None}
        assert not stuck, f"deadlock: {stuck}"


@given(schedules(), st.tuples(*[st.floats(0.1, 3)] * 3), st.floats(0, 4))
@settings(max_examples=200, deadline=None)
def test_program_does_not_deadlock_without_send_buffers(schedule, times, latency):
    steps = build_programs(schedule, ActionTimes(*times), latency)
    ran = [[tuple(filter(None, step)) for step in order if isinstance(step, RunAction)] for order in steps]
    assert ran == [list(schedule.iterate_turns(rank)) for rank in range(schedule.ranks)]
    assert [tuple(action for turn in turns for action in turn) for turns in ran] == list(schedule.actions)
    Rendezvous(schedule, steps).carry_out()


def test_stages_on_one_rank_send_nothing():
    alone = build_programs(make_schedule("interleaved_1f1b", ranks=1, microbatches=3))
    assert all(isinstance(step, RunAction) for step in alone[0])
    turn = build_programs(make_schedule("zb_v", ranks=2, microbatches=1))[1]  # rank 1 has the middle stages 1 and 2
    assert sum(isinstance(step, Send) for step in turn) == 2


def test_program_posts_receives_early_and_sends_immediately():
    first, second = build_programs(make_schedule("1f1b", ranks=2, microbatches=2))
    forward, back = Message("F", 1, 0, 1), Message("B", 0, 1, 0)
    assert first[:4] == (
        RunAction(PipelineAction("F", 0, 0)),
        Send(Message("F", 0, 0, 1), 1),
        RunAction(PipelineAction("F", 0, 1)),
        Send(forward, 1),
    )
    hidden = second.index(Recv(forward, 0, 0))
    assert second[hidden + 1 :][:2] == (RunAction(PipelineAction("B", 0, 0)), Send(back, 0))


def test_rendezvous_model_detects_deadlock():
    """Move a receive to the front of rank 0, so that both ranks wait for a message at first."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    first, second = (list(order) for order in build_programs(schedule))
    i = next(i for i, step in enumerate(first) if isinstance(step, Recv))
    first.insert(0, first.pop(i))
    with pytest.raises(AssertionError, match="deadlock"):
        Rendezvous(schedule, [first, second]).carry_out()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_memory_of_sent_tensors_is_bounded(name):
    """Check that the number of tensors that are sent and may not have arrived does not grow with the microbatches."""

    def most(microbatches):
        found = 0
        for order in build_programs(make_schedule(name, ranks=4, microbatches=microbatches)):
            sent, freed = defaultdict(int), defaultdict(int)
            for step in order:
                if isinstance(step, Send):
                    sent[step.peer] += 1
                elif isinstance(step, Recv):
                    freed[step.peer] = step.frees
                found = max(found, sum(sent.values()) - sum(freed.values()))
        return found

    if name != "gpipe":
        assert most(48) == most(24) < 24
