"""Two computations that alternate at overlap points: one runs at a time, and errors end both."""

from __future__ import annotations

import threading

import pytest
import torch

from gangline.model import forward_context
from gangline_parallel_megatron_style.pipeline.turns import TurnTaking


def steps(name: str, waits: int, said: list[str]):
    def work():
        for number in range(waits):
            said.append(f"{name}{number}")
            forward_context.overlap_point()
        said.append(f"{name} ends")

    return work


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (2, 2, ["a0", "b0", "a1", "b1", "a ends", "b ends"]),
        (0, 2, ["a ends", "b0", "b1", "b ends"]),
        (3, 1, ["a0", "b0", "a1", "b ends", "a2", "a ends"]),
        (1, 0, ["a0", "b ends", "a ends"]),
        (0, 0, ["a ends", "b ends"]),
    ],
)
def test_computations_alternate_at_overlap_points(a, b, expected):
    turns = TurnTaking()
    for _ in range(3):
        said: list[str] = []
        seconds = turns.run(steps("a", a, said), steps("b", b, said))
        assert said == expected
        assert min(seconds) > 0
    assert forward_context._overlap_point is None


def test_second_computation_reuses_one_thread():
    turns, names = TurnTaking(), set()
    for _ in range(3):
        turns.run(lambda: None, lambda: names.add(threading.get_ident()))
    assert len(names) == 1
    assert threading.get_ident() not in names


def test_each_computation_has_its_own_forward_context():
    seen = {}

    def emits(microbatch):
        collected = forward_context.Collected()
        with (
            forward_context.frame(forward_context.Frame(microbatch=microbatch, collected=collected)),
            forward_context.emit_under(f"blocks.{microbatch}"),
        ):
            forward_context.overlap_point()
            forward_context.emit_metric("here", torch.tensor(float(microbatch)))
            forward_context.overlap_point()
        seen[microbatch] = [*collected.metrics]

    with forward_context.emit_under("outside"):
        TurnTaking().run(lambda: emits(1), lambda: emits(2))
        assert forward_context._path == "outside"
    assert seen == {1: [(1, "blocks.1", "here")], 2: [(2, "blocks.2", "here")]}
    assert forward_context._frame is None


@pytest.mark.parametrize("failing", [0, 1])
def test_error_in_one_computation_ends_the_other(failing):
    turns, ended = TurnTaking(), []

    def fails():
        forward_context.overlap_point()
        raise ArithmeticError("this one")

    def goes_on():
        try:
            forward_context.overlap_point()
            forward_context.overlap_point()
            forward_context.overlap_point()
        finally:
            ended.append(True)

    both = [goes_on, goes_on]
    both[failing] = fails
    with pytest.raises(ArithmeticError, match="this one"):
        turns.run(*both)
    assert ended == [True]
    said: list[str] = []
    turns.run(steps("a", 1, said), steps("b", 1, said))
    assert said == ["a0", "b0", "a ends", "b ends"]


def test_two_backward_passes_can_alternate():
    """Check two computations that alternate in the middle of their backward passes."""

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            forward_context.overlap_point()
            return 2 * grad

    def gradient(size, found):
        x = torch.ones(size, requires_grad=True)
        Waits.apply(Waits.apply(x)).sum().backward()
        found.append(x.grad)

    one, two = [], []
    TurnTaking().run(lambda: gradient(2, one), lambda: gradient(3, two))
    assert one[0].equal(torch.full((2,), 4.0))
    assert two[0].equal(torch.full((3,), 4.0))
