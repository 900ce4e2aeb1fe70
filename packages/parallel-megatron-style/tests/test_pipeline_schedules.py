"""Pipeline schedules of any size: complete, ordered, deadlock-free, with the bubble and memory of their papers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from gangline_basics.explain.timeline import ActionTimes
from gangline_parallel_megatron_style.pipeline.actions import PipelineAction, Schedule
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES, make_forward_schedule, make_schedule
from gangline_parallel_megatron_style.pipeline.simulate import count_peak_activations, simulate
from gangline_parallel_megatron_style.pipeline.validate import validate

names = st.sampled_from(sorted(SCHEDULES))


@st.composite
def sizes(draw):
    """Draw (name, ranks, microbatches, chunks)."""
    name = draw(names)
    chunks = draw(st.integers(1, 4)) if SCHEDULES[name].free_chunks else SCHEDULES[name].chunks
    return name, draw(st.integers(1, 9)), draw(st.integers(1, 30)), chunks


def make(size, **more) -> Schedule:
    name, ranks, microbatches, chunks = size
    return make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks, **more)


@given(sizes())
@settings(max_examples=150, deadline=None)
def test_every_schedule_is_valid_and_within_memory(size):
    name, ranks, microbatches, chunks = size
    schedule = make(size)
    validate(schedule)
    assert schedule.placement == SCHEDULES[name].placement
    assert schedule.splits_backward == SCHEDULES[name].splits_backward or (name == "dualpipe_v" and microbatches == 1)
    for rank, peak in enumerate(count_peak_activations(schedule)):
        assert peak <= SCHEDULES[name].activations(ranks, microbatches, chunks, rank)


@given(sizes())
@settings(max_examples=150, deadline=None)
def test_bubble_with_equal_action_times_matches_formula(size):
    name, ranks, microbatches, chunks = size
    found = simulate(make(size)).bubble
    if SCHEDULES[name].exact(ranks, microbatches):
        assert found == pytest.approx(SCHEDULES[name].compute_bubble(ranks, microbatches, chunks), abs=1e-12)
    else:
        assert found >= SCHEDULES[name].compute_bubble(ranks, microbatches, chunks) - 1e-12


# Idle time of each of p ranks, counted by hand for F = I = W = 1 and B = 2 of one chunk.
IDLE = {
    "gpipe": lambda p: 3 * (p - 1),
    "1f1b": lambda p: 3 * (p - 1),
    "interleaved_1f1b": lambda p: 3 * (p - 1),
    "zb_h1": lambda p: p - 1,
    "zb_v": lambda p: p - 1,
    "dualpipe_v": lambda p: p - 1,
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_makespan_matches_hand_count(name, ranks):
    schedule = make_schedule(name, ranks=ranks, microbatches=3 * ranks)
    assert simulate(schedule).makespan == 3 * 3 * ranks * schedule.chunks + IDLE[name](ranks)


@given(st.integers(1, 6), st.integers(1, 20), st.tuples(*[st.floats(0.5, 3)] * 3))
@settings(max_examples=60, deadline=None)
def test_unsplit_backward_bubble_formulas_hold_for_any_times(ranks, microbatches, times):
    times = ActionTimes(F=times[0], I=times[1], W=times[2])
    for name, chunks, m in (
        ("gpipe", 1, microbatches),
        ("1f1b", 1, microbatches),
        ("interleaved_1f1b", 3, microbatches * ranks),
    ):
        bubble = simulate(make_schedule(name, ranks=ranks, microbatches=m, chunks=chunks), times).bubble
        assert bubble == pytest.approx(SCHEDULES[name].compute_bubble(ranks, m, chunks, times), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_schedules_match_their_papers(ranks):
    """Compare ZB-H1 with its formula for W < F < I, as in its paper, and bound DualPipeV by DualPipe's table."""
    times = ActionTimes(F=1.0, I=1.1, W=0.8)
    microbatches = 3 * ranks
    h1 = simulate(make_schedule("zb_h1", ranks=ranks, microbatches=microbatches), times)
    assert h1.bubble == pytest.approx(SCHEDULES["zb_h1"].compute_bubble(ranks, microbatches, 1, times))
    dual = simulate(make_schedule("dualpipe_v", ranks=ranks, microbatches=microbatches), times)
    pair = times.F + times.get_time("B")
    assert dual.makespan - dual.compute_busy_time(0) <= (ranks - 1) * (pair + times.get_time("B") - 3 * times.W) + 1e-9


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [ActionTimes(), ActionTimes(F=1.0, I=1.1, W=0.8)])
def test_overlapped_dualpipe_v_idle_time_matches_paper(ranks, times):
    microbatches = 2 * ranks + 1
    found = simulate(make_schedule("dualpipe_v", ranks=ranks, microbatches=microbatches, overlap=True), times)
    both, whole = times.F + times.get_time("B"), times.get_time("B")
    assert found.makespan - found.compute_busy_time(0) == pytest.approx((ranks - 1) * (both + whole - 3 * times.W))


@given(st.integers(1, 8), st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_overlap_keeps_action_order_and_is_valid(ranks, microbatches):
    paired, plain = (
        make_schedule("dualpipe_v", ranks=ranks, microbatches=microbatches, overlap=o) for o in (True, False)
    )
    validate(paired)
    assert paired.actions == plain.actions
    assert plain.pairs == frozenset()
    assert paired.pairs or microbatches < 2 * ranks
    for rank in range(ranks):
        for turn in paired.iterate_turns(rank):
            kinds = [action.kind for action in turn]
            assert len(turn) == 1 or (kinds == ["F", "B"] and turn[0].chunk != turn[1].chunk)


@given(st.integers(1, 6), st.integers(1, 14), st.data())
@settings(max_examples=60, deadline=None)
def test_zb_v_for_any_times_is_valid(ranks, microbatches, data):
    """Draw any times for each stage, and check that the memory bound still holds."""
    time = st.floats(0.01, 3)
    times = [ActionTimes(*data.draw(st.tuples(time, time, time))) for _ in range(2 * ranks)]
    schedule = make_schedule("zb_v", ranks=ranks, microbatches=microbatches, times=times)
    validate(schedule)
    assert max(count_peak_activations(schedule)) <= 2 * ranks


def test_zb_v_for_given_times_has_smaller_bubble():
    times = ActionTimes(F=1.0, I=1.2, W=0.8)
    blind, told = (
        simulate(make_schedule("zb_v", ranks=4, microbatches=16, **k), times) for k in ({}, {"times": times})
    )
    assert told.bubble < 0.5 * blind.bubble


def test_bubbles_are_ordered_as_in_papers():
    """Check that idle time falls from 1F1B to zero-bubble schedules, at equal memory or with more chunks."""
    bubble = {name: simulate(make_schedule(name, ranks=4, microbatches=8)).bubble for name in SCHEDULES}
    assert bubble["zb_v"] == bubble["dualpipe_v"] < bubble["zb_h1"] < bubble["interleaved_1f1b"] < bubble["1f1b"]
    assert bubble["1f1b"] == bubble["gpipe"] == pytest.approx(3 / 11)


def test_makespan_grows_with_microbatches():
    for name in SCHEDULES:
        for ranks in (2, 3, 4):
            made = [make_schedule(name, ranks=ranks, microbatches=microbatches) for microbatches in range(1, 4 * ranks)]
            spans = [simulate(schedule).makespan for schedule in made]
            assert spans == sorted(spans), name


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from([("loop", 1), ("loop", 3), ("v", 2)]))
@settings(max_examples=40, deadline=None)
def test_forward_schedule_runs_each_action_once(ranks, microbatches, placed):
    placement, chunks = placed
    schedule = make_forward_schedule(ranks, microbatches, chunks, placement)
    expected = {PipelineAction("F", chunk, microbatch) for chunk in range(chunks) for microbatch in range(microbatches)}
    assert all(set(order) == expected and len(order) == len(expected) for order in schedule.actions)
    waits = simulate(schedule).makespan - microbatches * chunks
    if placement == "v":
        assert waits == 2 * (ranks - 1)
    elif microbatches % ranks == 0 or chunks == 1:
        assert waits == ranks - 1


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_stage_placement_is_one_to_one(placement):
    schedule = make_forward_schedule(4, 1, 2, placement)
    assert sorted(schedule.get_stage(rank, chunk) for rank in range(4) for chunk in range(2)) == list(range(8))
    for stage in range(8):
        assert schedule.get_stage(*schedule.get_place(stage)) == stage
    assert [schedule.get_place(stage)[0] for stage in (0, 3, 4, 7)] == (
        [0, 3, 0, 3] if placement == "loop" else [0, 3, 3, 0]
    )


def broken(change) -> Schedule:
    schedule = make_schedule("zb_h1", ranks=2, microbatches=3)
    return replace(schedule, actions=(tuple(change(list(schedule.actions[0]))), *schedule.actions[1:]))


def swapped(order, one, two):
    i, j = order.index(one), order.index(two)
    order[i], order[j] = order[j], order[i]
    return order


FAULTS = {
    "runs F1 of chunk 0 0 times": lambda order: [a for a in order if a != PipelineAction("F", 0, 1)],
    "runs F1 of chunk 0 2 times": lambda order: [*order, PipelineAction("F", 0, 1)],
    "B 0, I 1 and W 0 times for microbatch 2": lambda order: order[:-1],
    "B 1, I 1 and W 1 times for microbatch 0": lambda order: [*order, PipelineAction("B", 0, 0)],
    "F7 of chunk 0, a chunk or microbatch that does not exist": lambda order: [*order, PipelineAction("F", 0, 7)],
    "W1 of chunk 0 after microbatch -1": lambda order: swapped(
        order, PipelineAction("W", 0, 0), PipelineAction("W", 0, 1)
    ),
    "I1 of chunk 0 after microbatch -1": lambda order: swapped(
        order, PipelineAction("I", 0, 0), PipelineAction("I", 0, 1)
    ),
    "deadlock: rank 0 waits before I0": lambda order: swapped(
        order, PipelineAction("I", 0, 0), PipelineAction("F", 0, 0)
    ),
    "deadlock: rank 0 waits before W0": lambda order: swapped(
        order, PipelineAction("W", 0, 0), PipelineAction("I", 0, 0)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_validate_names_each_fault(fault):
    with pytest.raises(ValueError, match=fault):
        validate(broken(FAULTS[fault]))


def test_schedule_deadlock_error_names_waiting_action():
    """Make rank 0 wait for the gradient of microbatch 0 before it runs F1, whose output rank 1 needs first."""
    first = [PipelineAction(*a) for a in (("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1))]
    second = [PipelineAction(*a) for a in (("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1))]
    with pytest.raises(ValueError, match=r"rank 0 waits before B0 of chunk 0 for B of microbatch 0 on stage 1"):
        validate(Schedule(2, 1, 2, "loop", (tuple(first), tuple(second))))


def test_invalid_schedule_arguments_are_refused():
    with pytest.raises(ValueError, match="unknown pipeline schedule 2f2b; choices: gpipe, 1f1b"):
        make_schedule("2f2b", ranks=2, microbatches=2)
    with pytest.raises(ValueError, match="1f1b needs chunks=1 per rank, not 2"):
        make_schedule("1f1b", ranks=2, microbatches=2, chunks=2)
    with pytest.raises(ValueError, match="0 microbatches"):
        make_schedule("1f1b", ranks=2, microbatches=0)
    with pytest.raises(ValueError, match="times of 2 stages for a schedule of 4"):
        simulate(make_schedule("1f1b", ranks=4, microbatches=2), [ActionTimes(), ActionTimes()])
    with pytest.raises(ValueError, match="must be more than 0"):
        simulate(make_schedule("1f1b", ranks=4, microbatches=2), ActionTimes(F=0))
