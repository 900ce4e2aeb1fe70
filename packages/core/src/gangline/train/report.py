"""Reporter: passes step records and notes to the trackers, and computes MFU; `Clock` times the phases of a step."""

from __future__ import annotations

import errno
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from gangline.comm.base import Comms
from gangline.config.schema import Run
from gangline.config.serial import to_dict
from gangline.mesh import DATA_AXES, Mesh
from gangline.model.flops import count_flops_per_token, count_parameters, count_trained
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline.plugin import registry
from gangline.precision import Precision
from gangline.pulse.write import get_current
from gangline.record import StepRecord
from gangline.track import Start, Tracker
from gangline.train.peaks import find_peak_flops

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full disk, quota or file size limit: tracker is retried in each step


class Clock:
    """Clock of the current step: seconds by phase; phases are also shown to a profiler and in the pulse."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.pulse = get_current()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        # a range costs microseconds even without a profiler, so it is opened only for a profiler
        profiler_range = record_function(phase) if profiler._is_profiler_enabled else nullcontext()
        try:
            with profiler_range, self.pulse.enter_phase(phase):
                yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


class Reporter:
    """Reporter to the trackers on global rank 0; on other ranks it has no trackers.

    MFU = FLOPs per token of the model x tokens per second / (peak FLOP/s of one device x number of devices).
    """

    def __init__(
        self,
        trackers: dict[str, Tracker],
        flops: float,
        parameters: int,
        peak: float | None,
        describe: dict[str, str],
        measured: bool = False,
    ) -> None:
        self.trackers, self.describe = trackers, describe
        self.flops, self.parameters, self.peak, self.measured = flops, parameters, peak, measured
        self.failed: set[str] = set()
        self.full: set[str] = set()  # trackers with a full disk, which the user knows from a note
        self.noted: list[str] = []  # notes since the last record

    @classmethod
    def build(
        cls, run: Run, tree: Node, plan: Plan, mesh: Mesh, comms: Comms, device: torch.device, precision: Precision
    ) -> Reporter:
        flops, parameters = count_flops_per_token(tree, run.batch.sequence_length, plan), count_parameters(tree)
        if comms.rank != 0:
            return cls({}, flops, parameters, None, {})
        peak, source = find_peak_flops(device, precision.compute_dtype)
        trackers = {name: registry.build(config, run) for name, config in run.track.items()}
        layout = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes if size > 1) or "one process"
        share = run.batch.global_size // mesh.size(*DATA_AXES)
        accumulation = (
            share // run.batch.micro_size if run.batch.micro_size else run.parallel.count_microbatches(share, mesh)
        )
        rate = "unknown" if peak is None else f"{peak / 1e12:.3g} TFLOP/s per device ({source})"
        trained_parameters = count_trained(tree, plan)
        of = "" if trained_parameters == parameters else f", {trained_parameters / 1e6:.4g} M trained"
        describe = {
            "model": f"{parameters / 1e6:.4g} M parameters{of}, {flops / 1e6:.4g} MFLOP per token (forward + backward)",
            "layout": f"{layout} on {device.type}, accumulation {accumulation}",
            "peak": rate,
        }
        whole = None if peak is None else peak * mesh.world
        return cls(trackers, flops, parameters, whole, describe, measured=device.type == "cpu")

    def begin(self, run: Run, directory: str, step: int, attempt: int, world: int) -> None:
        start = Start(
            run.job.name, directory, step, run.steps, attempt, self.parameters, world, self.describe, to_dict(run)
        )
        self._call_each("begin", start)

    def record(self, record: StepRecord) -> None:
        record.notes, self.noted = self.noted, []
        self._call_each("record", record)

    def note(self, text: str) -> None:
        self.noted.append(text)
        self._call_each("note", text)

    def end(self, summary: dict) -> None:
        self._call_each("start_end", summary)  # trackers send in parallel, so their timeouts overlap
        self._call_each("end", summary)

    def compute_mfu(self, tokens_per_second: float) -> float | None:
        """Return the MFU; None without a peak. A measured peak is raised to the run's own FLOP/s if they are higher."""
        if self.peak is None:
            return None
        achieved = self.flops * tokens_per_second
        if self.measured:
            self.peak = max(self.peak, achieved)
        return achieved / self.peak

    def _call_each(self, call: str, argument: object) -> None:
        for name, tracker in self.trackers.items():
            if name in self.failed:
                continue
            try:
                getattr(tracker, call)(argument)
                if call == "record":
                    self.full.discard(name)
            except Exception as error:  # a tracker may be third-party code and must not end a run
                if call == "record" and isinstance(error, OSError) and error.errno in FULL:
                    if name not in self.full:
                        self.full.add(name)
                        self.note(f"track={name} cannot write ({error.strerror}); core tries again in each step")
                    continue
                self.failed.add(name)
                self._call_each(
                    "note", f"track={name} failed and is disabled from now on: {type(error).__name__}: {error}"
                )


def measure_peak_memory(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: device memory on a GPU, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
