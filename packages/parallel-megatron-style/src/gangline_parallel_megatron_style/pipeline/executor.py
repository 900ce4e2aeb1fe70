"""Executor of one rank's part of a pipelined step: it runs the rank's program with torch."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending
from gangline_basics.explain.timeline import ActionTimes
from gangline_parallel_megatron_style.pipeline.action_times import UNIFORM
from gangline_parallel_megatron_style.pipeline.actions import PipelineAction, Schedule
from gangline_parallel_megatron_style.pipeline.program import (
    Message,
    Program,
    Recv,
    RunAction,
    Send,
    build_programs,
    find_input_message,
    find_output_message,
)
from gangline_parallel_megatron_style.pipeline.rank_stages import RankStages
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES, make_forward_schedule, make_schedule
from gangline_parallel_megatron_style.pipeline.simulate import Span
from gangline_parallel_megatron_style.pipeline.turns import TurnTaking

AHEAD = 4  # maximum number of pending messages to one other rank in an evaluation


class Executor:
    """Executor of pipeline steps on the rank `comm.index` of the axis pp.

    name, chunks, times  as in `make_schedule`; must be equal on all ranks
    clock                function that returns the time before and after each action, for `spans`; it must synchronize a
                         GPU to include the GPU's work
    overlap              as in `make_schedule`: whether forwards overlap with backwards
    """

    def __init__(
        self,
        stage: RankStages,
        comm: Comm,
        name: str,
        *,
        chunks: int | None = None,
        times: ActionTimes | Sequence[ActionTimes] = UNIFORM,
        clock: Callable[[], float] | None = None,
        overlap: bool = False,
    ) -> None:
        self.stage, self.comm, self.clock = stage, comm, clock
        self.name, self.times, self.overlap = name, times, overlap
        self._turns = TurnTaking()
        self.chunks = SCHEDULES[name].chunks if chunks is None else chunks
        self.spans: tuple[Span, ...] = ()  # (start, end) of each action of the latest step or evaluation, with a clock
        self._made: dict[tuple[int, bool], tuple[Schedule, Program]] = {}
        self._known: set[tuple[torch.Size, torch.dtype]] = set()  # shapes and dtypes that passed the check

    def step(self, microbatches: int) -> list[Tensor]:
        """Run forward and backward of all microbatches of a step; gradients accumulate in the parameters' `.grad`.

        Returns the losses of the microbatches (0-d, detached, in order) on the rank that has the last stage; an empty
        list on other ranks.
        """
        self.stage.deferred.clear()
        return self._carry_out(microbatches, True)

    def evaluate(self, microbatches: int) -> list[Tensor]:
        """Run the forward passes of all microbatches without autograd, and return the losses like `step`."""
        with torch.no_grad():
            return self._carry_out(microbatches, False)

    def get_schedule(self, microbatches: int, train: bool = True) -> Schedule:
        """Return the schedule of a step with `microbatches` microbatches, or of an evaluation if not `train`."""
        return self._plan(microbatches, train)[0]

    def _carry_out(self, microbatches: int, train: bool) -> list[Tensor]:
        schedule, program = self._plan(microbatches, train)
        one = _Pass(self.stage, self.comm, schedule, train, self.clock, self._known, self._turns)
        for step in program:
            match step:
                case RunAction(action, beside) if beside is not None:
                    one.run_both(action, beside)
                case RunAction(action):
                    one.run(action)
                case Send(message, peer):
                    one.send(message, peer)
                case Recv(message, peer, frees):
                    one.receive(message, peer, frees)
        one.finish()
        self.spans = tuple(one.spans)
        return [one.losses[microbatch] for microbatch in sorted(one.losses)]

    def _plan(self, microbatches: int, train: bool) -> tuple[Schedule, Program]:
        if (microbatches, train) not in self._made:
            ranks, chunks = self.comm.size, self.chunks
            if train:
                sizes = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
                schedule = make_schedule(self.name, **sizes, times=self.times, overlap=self.overlap)
            else:
                schedule = make_forward_schedule(ranks, microbatches, chunks, SCHEDULES[self.name].placement)
            self._made[microbatches, train] = schedule, build_programs(schedule, self.times)[self.comm.index]
        return self._made[microbatches, train]


class _Pass:
    """The state of one step or evaluation in progress."""

    def __init__(
        self,
        stage: RankStages,
        comm: Comm,
        schedule: Schedule,
        train: bool,
        clock: Callable[[], float] | None,
        known: set[tuple[torch.Size, torch.dtype]],
        turns: TurnTaking,
    ) -> None:
        self.known, self.turns = known, turns
        self.stage, self.comm, self.schedule, self.train, self.clock = stage, comm, schedule, train, clock
        self.losses: dict[int, Tensor] = {}
        self.spans: list[Span] = []
        self.live: dict[
            tuple[int, int], tuple[Tensor | None, Tensor]
        ] = {}  # (chunk, microbatch) -> (input hidden state as a leaf, output)
        self.made: dict[Message, Tensor] = {}  # results to send, or to use in another stage of this rank
        self.coming: dict[Message, tuple[Tensor, Pending, int, int]] = {}  # (buffer, transfer, peer, `Recv.frees`)
        self.sent: dict[int, deque[tuple[Tensor, Pending]]] = defaultdict(deque)  # peer -> tensors kept until arrival
        self.freed: dict[int, int] = defaultdict(int)

    def run(self, action: PipelineAction) -> None:
        input_tensor = self._take_input(action)
        start = self.clock() if self.clock else 0.0
        self._run(action, input_tensor)
        if self.clock:
            self.spans.append((start, self.clock()))

    def run_both(self, forward: PipelineAction, backward: PipelineAction) -> None:
        """Run a forward and a backward in turns.

        Record the two spans one after the other, each as long as its action ran.
        """
        inputs = self._take_input(forward), self._take_input(backward)
        start = self.clock() if self.clock else 0.0
        first, second = (partial(self._run, action, it) for action, it in zip((forward, backward), inputs, strict=True))
        seconds, _ = self.turns.run(first, second)
        if self.clock:
            self.spans += [(start, start + seconds), (start + seconds, self.clock())]

    def _take_input(self, action: PipelineAction) -> Tensor | None:
        message = find_input_message(self.schedule, self.comm.index, action)
        return None if message is None else self._take(message)

    def _run(self, action: PipelineAction, given: Tensor | None) -> None:
        if action.kind == "F":
            out = self._forward(action, given)
        elif action.kind == "W":
            with torch.no_grad():  # autograd also disables gradients in a backward pass
                self.stage.compute_weight_grads(action.chunk, action.microbatch)
            out = None
        else:
            out = self._backward(action, given)
        message = find_output_message(self.schedule, self.comm.index, action)
        if message is not None and out is not None:
            self.made[message] = out

    def send(self, message: Message, peer: int) -> None:
        tensor = self.made.pop(message).contiguous()
        self._check_shape_and_dtype(message, tensor)
        pending = self.comm.start_exchange([(tensor, peer)], [])
        self.sent[peer].append((tensor, pending))
        if not self.train and len(self.sent[peer]) > AHEAD:  # an evaluation receives no gradient that confirms arrival
            self._release(peer)

    def _check_shape_and_dtype(self, message: Message, tensor: Tensor) -> None:
        """Raise TypeError if a tensor does not fit the receiver's buffer: a transfer of another size may hang."""
        described = tensor.shape, tensor.dtype
        if described in self.known:
            return
        expected = self.stage.allocate_hidden(message.microbatch)
        if described != (expected.shape, expected.dtype):
            raise TypeError(
                f"stage {message.source} sends shape {tuple(tensor.shape)}, {tensor.dtype} to stage {message.target}, "
                f"which expects shape {tuple(expected.shape)}, {expected.dtype}: a block must keep the shape and the "
                "dtype of the hidden state"
            )
        self.known.add(described)

    def receive(self, message: Message, peer: int, frees: int) -> None:
        into = self.stage.allocate_hidden(message.microbatch)
        pending = self.comm.start_exchange([], [(into, peer)])
        self.coming[message] = into, pending, peer, frees

    def finish(self) -> None:
        """Wait for all sends that are still pending."""
        for queue in self.sent.values():
            for _, pending in queue:
                pending.wait()
        self.sent.clear()

    def _take(self, message: Message) -> Tensor:
        if message in self.made:  # the source stage is on this rank
            return self.made.pop(message)
        into, pending, peer, frees = self.coming.pop(message)
        pending.wait()
        while self.freed[peer] < frees:
            self._release(peer)  # short wait: by `Recv.frees`, the tensor has arrived
        return into

    def _release(self, peer: int) -> None:
        """Release the oldest tensor that was sent to the rank `peer`, once it has arrived."""
        self.sent[peer].popleft()[1].wait()
        self.freed[peer] += 1

    def _forward(self, action: PipelineAction, hidden: Tensor | None) -> Tensor:
        if hidden is not None:
            hidden = hidden.detach().requires_grad_(self.train)
        output = self.stage.forward(action.chunk, action.microbatch, hidden)
        if self.train:
            self.live[action.chunk, action.microbatch] = hidden, output
        if self.schedule.get_stage(self.comm.index, action.chunk) == self.schedule.stages - 1:
            self.losses[action.microbatch] = output.detach()
        return output.detach()

    def _backward(self, action: PipelineAction, grad: Tensor | None) -> Tensor | None:
        chunk, microbatch = action.chunk, action.microbatch
        leaf, output = self.live.pop((chunk, microbatch))
        with self.stage.deferred.open(chunk, microbatch) if action.kind == "I" else nullcontext():
            self.stage.backward(chunk, microbatch, output, grad)
        if leaf is None:
            return None
        if leaf.grad is None:
            stage = self.schedule.get_stage(self.comm.index, chunk)
            raise RuntimeError(f"stage {stage} computed no gradient of its input in microbatch {microbatch}")
        return leaf.grad
