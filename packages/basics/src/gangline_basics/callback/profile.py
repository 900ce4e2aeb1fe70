"""Traces of chosen steps by torch.profiler, and GPU memory snapshots, as files for standard viewers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from gangline.callback import Callback
from gangline.comm.base import Comms, Store
from gangline.config.schema import Run
from gangline.optimizer import Optimizer
from gangline.record import StepRecord
from gangline.runtime import Runtime
from gangline_basics.callback.config import Profile

BLOCKS = 100_000  # maximum number of events in a memory snapshot


class ProfileCallback(Callback):
    """Callback that writes a trace file for each range of consecutive steps; the profiler is prepared one step earlier.

    If a run starts or ends inside a range, the trace file covers the steps that ran, and the file name contains the
    first and last of these steps. In a step without a trace, the callback costs two dict look-ups. The phases of the
    training loop and each step (`ProfilerStep#10`, the name that TensorBoard needs) are annotated in the trace.
    """

    def __init__(self, config: Profile, run: Run) -> None:
        self.config = config
        self.directory = Path(str(run.job.dir)) / "profile"
        self._last: dict[int, int] = {}  # step to trace -> last step of its range of consecutive steps
        self._tracer: profile | None = None
        self._steps: tuple[int, int] = (0, 0)  # first and last step in the current trace
        self._next = 0  # expected next step; another step means that the run has rewound
        self._recording = False
        self._range: record_function | None = None

    def attach(
        self, runtime: Runtime, optimizer: Optimizer, comms: Comms, store: Store | None, device: torch.device
    ) -> None:
        self.rank, self.device = comms.rank, device
        if self.rank in self.config.ranks:
            self._last = {step: end for start, end in iterate_rows(self.config.steps) for step in range(start, end + 1)}

    def before_step(self, step: int) -> None:
        if self._tracer is not None and step != self._next:  # the run rewound to an earlier step
            self._close()
        self._next = step + 1
        if step in self._last and not self._recording:
            self._open(step)
        elif step not in self._last and step + 1 in self._last:
            self._prepare()
        if self._recording:
            self._steps = self._steps[0], step
            self._range = record_function(f"ProfilerStep#{step}")
            self._range.__enter__()

    def after_step(self, record: StepRecord, applied: bool) -> None:
        if self._recording:
            self._end_range()
            if record.step == self._last[record.step]:
                self._close()

    def end(self, why: str) -> None:
        self._close()

    def on_error(self, error: BaseException) -> None:
        self._close()

    def _prepare(self) -> None:
        """Start the profiler one step early without recording, so that its startup cost is not in the trace."""
        config = self.config
        self._tracer = profile(record_shapes=config.shapes, profile_memory=config.memory, with_stack=config.stacks)
        self._tracer.prepare_trace()

    def _open(self, first: int) -> None:
        if self._tracer is None:
            self._prepare()
        assert self._tracer is not None
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=BLOCKS)
        self._tracer.start_trace()
        self._recording, self._steps = True, (first, first)

    def _close(self) -> None:
        """Write the recorded trace, and discard the profiler."""
        self._end_range()
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        if not self._recording:
            tracer.start_trace()  # the profiler must start a prepared trace before it can stop
            tracer.stop_trace()
            return
        self._recording = False
        tracer.stop_trace()
        self.directory.mkdir(parents=True, exist_ok=True)
        tracer.export_chrome_trace(str(self.directory / f"{self._name}.pt.trace.json.gz"))
        if self._snapshots:
            torch.cuda.memory._dump_snapshot(str(self.directory / f"{self._name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    @property
    def _snapshots(self) -> bool:
        return self.config.memory and self.device.type == "cuda"

    @property
    def _name(self) -> str:
        """File name without extension; TensorBoard shows the text before ".pt.trace.json" as the name of the worker."""
        first, last = self._steps
        steps = f"step-{first:08d}" if first == last else f"steps-{first:08d}-{last:08d}"
        return f"{steps}.rank-{self.rank:05d}"


def iterate_rows(steps: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each range of consecutive numbers, in ascending order."""
    numbers = sorted(set(steps))
    starts = [step for step in numbers if step - 1 not in numbers]
    ends = [step for step in numbers if step + 1 not in numbers]
    return zip(starts, ends, strict=True)
