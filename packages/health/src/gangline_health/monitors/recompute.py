"""Recomputation of a step from the same weights and data, to find a rank whose results are not reproducible.

No replica is needed. In both computations, each rank records checksums of the inputs and outputs of its collectives,
and of its loss and gradients. If one rank computes wrongly, the results of all ranks differ. The rank to blame is the
rank whose first difference is in its own result, not in the output of a collective: its inputs were equal until then.
If there is no such rank, a transfer changed its data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from gangline.comm.base import Comm, Comms, Pending, Reduction
from gangline.comm.wrap import Wrapped, WrappedComms
from gangline.health import Action, Verdict
from gangline_health.monitors.bits import list_gradients, sum_words

if TYPE_CHECKING:
    from torch import Tensor

    from gangline.batch import Batch
    from gangline.runtime import Runtime, StepResult

T = TypeVar("T")

SAME, COMPUTED, RECEIVED = 0, 1, 2


@dataclass
class Event:
    """Checksum of a tensor that a rank computed (`own`) or received from a collective; `what` describes it."""

    what: str
    own: bool
    sums: Tensor


class Recorder:
    """Recorder of the events of a step; `events` is None while it does not record."""

    events: list[Event] | None = None

    def note(self, what: str, own: bool, *tensors: Tensor) -> None:
        if self.events is not None:
            self.events += [Event(what, own, sum_words(tensor)) for tensor in tensors if tensor.numel()]

    @contextmanager
    def record_events(self) -> Iterator[list[Event]]:
        """Record the events of this rank within the context, and yield the list of events."""
        events: list[Event] = []
        self.events = events
        try:
            yield events
        finally:
            self.events = None


RECORDER = Recorder()  # one per process, because communicators are built before the monitor that records


class RecordedPending(Generic[T]):
    """Pending collective that records its result when `wait` returns it."""

    def __init__(self, inner: Pending[T], what: str) -> None:
        self.inner, self.what = inner, what

    def wait(self) -> T:
        result = self.inner.wait()
        got: Any = result
        RECORDER.note(self.what, False, *([got] if isinstance(got, torch.Tensor) else got))
        return result


class RecordedComm(Wrapped):
    """Communicator that records inputs and outputs of collectives while `RECORDER` records."""

    def _note(self, name: str, call: Callable[[], Pending[T]], *given: Tensor) -> Pending[T]:
        if RECORDER.events is None:
            return call()
        what = f"{name} along {self.axis}"
        RECORDER.note(what, True, *given)
        return RecordedPending(call(), what)

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        return self._note("all_reduce", lambda: self.inner._all_reduce(x, op, background), x)

    def _all_gather(self, x: Tensor, into: Tensor | None, background: bool) -> Pending[Tensor]:
        return self._note("all_gather", lambda: self.inner._all_gather(x, into, background), x)

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        return self._note("reduce_scatter", lambda: self.inner._reduce_scatter(x, background), x)

    def _all_to_all(self, x: Tensor, in_splits: Any, out_splits: Any, background: bool) -> Pending[Tensor]:
        return self._note("all_to_all", lambda: self.inner._all_to_all(x, in_splits, out_splits, background), x)

    def _broadcast(self, x: Tensor, source: int, background: bool) -> Pending[Tensor]:
        inputs = [x] if source == self.index else []
        return self._note("broadcast", lambda: self.inner._broadcast(x, source, background), *inputs)

    def _exchange(self, sends: Any, recvs: Any, background: bool) -> Pending[Sequence[Tensor]]:
        inputs = [x for x, _ in sends]
        return self._note("exchange", lambda: self.inner._exchange(sends, recvs, background), *inputs)


def record_comms(comms: Comms) -> Comms:
    """Return `comms` wrapped, with communicators that `RECORDER` can record."""
    return WrappedComms(comms, RecordedComm)


class RepeatedSteps:
    """Wrapper of the runtime's step that computes every `every`-th step twice, and uses the second result."""

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.step = 0  # number of the current step
        self.trusted: int | None = None  # last step whose two computations were equal; None: not known yet
        self.rank = 0
        self.mine, self.where = SAME, ""  # kind of this rank's first difference, and its description
        self.looked = False  # True if the current step was computed twice
        self.found: list[int] = []  # kind of the first difference of each rank

    def attach(self, runtime: Runtime, rank: int) -> None:
        """Replace `runtime.step` by a function that computes every `every`-th step twice."""
        self.rank = rank
        if list(runtime.local()[0]):  # a step changes layout-local state (the remainder of compressed gradients)
            self.every = None
        if self.every is None:
            return
        once, every = runtime.step, self.every

        def step(microbatches: Sequence[Batch]) -> StepResult:
            if self.trusted is None:
                self.trusted = self.step - 1
            self.looked = self.step % every == 0
            return self._run_twice(runtime, once, microbatches) if self.looked else once(microbatches)

        runtime.step = step  # type: ignore[method-assign]

    def _run_twice(
        self, runtime: Runtime, once: Callable[[Sequence[Batch]], StepResult], batches: Sequence[Batch]
    ) -> StepResult:
        runs = []
        for _ in range(2):
            with RECORDER.record_events() as events:
                result = once(batches)
                loss = torch.tensor([result.loss_sum], dtype=torch.float64)
                RECORDER.note("the loss and the gradients", True, loss, *(g for _, _, g in list_gradients(runtime)))
            runs.append(events)
        self.mine, self.where = find_first_difference(*runs)
        return result

    def collective(self, comm: Comm, device: torch.device) -> None:
        """Gather the kind of the first difference of every rank, if this step was computed twice."""
        self.found = []
        if self.looked:
            difference = torch.tensor([self.mine], dtype=torch.int64, device=device)
            self.found = comm.all_gather(difference).tolist() if comm.size > 1 else [self.mine]
            if not any(self.found):
                self.trusted = self.step

    def judge(self, step: int) -> Iterable[Verdict]:
        """Yield a verdict if two computations of a step differ. A faulty rank reports itself: only it knows where."""
        if not any(self.found):
            return
        details: dict[str, int | str] = {"step": step, "first": (self.trusted or 0) + 1, "row": 1}
        prefix = f"silent data corruption: step {step} was computed twice from the same weights and data, and "
        if COMPUTED not in self.found:
            evidence = (
                f"{prefix}a collective changed the data: all ranks sent equal inputs, and received different outputs"
            )
            yield Verdict("corruption", "the network", 0.8, evidence, Action.ROLL_BACK, details=details)
        elif self.mine == COMPUTED:
            evidence = f"{prefix}the results of rank {self.rank} differ, first in {self.where}"
            details |= {"rank": self.rank, "exclude": f"rank {self.rank}"}
            yield Verdict("corruption", f"rank {self.rank}", 1.0, evidence, Action.ROLL_BACK, details=details)


def find_first_difference(before: Sequence[Event], after: Sequence[Event]) -> tuple[int, str]:
    """Return (SAME, COMPUTED or RECEIVED; description) of the first event that differs between two computations."""
    for one, other in zip(before, after, strict=False):
        if one.what != other.what or one.own != other.own or not torch.equal(one.sums, other.sums):
            return (COMPUTED if one.own or other.own else RECEIVED), one.what
    return (SAME, "") if len(before) == len(after) else (COMPUTED, "the number of collectives")
