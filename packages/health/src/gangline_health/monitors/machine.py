"""Monitor of the machine that a rank runs on: GPUs, memory, disk, file descriptors, clock."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from gangline.health import Action, Verdict
from gangline_health.config import MachineOptions
from gangline_health.gpus import Gpus, has_gpus
from gangline_health.monitors.base import Monitor
from gangline_health.probes import UNASKED, Findings, Probe, check_descriptors, check_disk, check_memory

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comm, Comms, Store
    from gangline.record import StepRecord
    from gangline.runtime import Runtime


CLOCKS = 1000  # number of steps between two comparisons of the ranks' clocks
PATIENCE = 2.0  # maximum wait at the start of the ranks for the first results of all probes, in seconds


class MachineMonitor(Monitor):
    """Monitor that reports a defect when a probe first finds it, and again if it disappears and returns.

    Only local rank 0 probes memory, disk and GPUs.
    """

    name = "machine"

    def __init__(self, options: MachineOptions, run_dir: str) -> None:
        checks: dict[str, Callable[[], Findings]] = {"descriptors": partial(check_descriptors, options.descriptors)}
        if os.environ.get("LOCAL_RANK", "0") == "0":
            checks |= {
                "memory": partial(check_memory, options.memory),
                "disk": partial(check_disk, run_dir, options.disk),
            }
            if has_gpus():
                checks["gpus"] = Gpus()
        self.probes = [Probe(name, ask, options.seconds, options.deadline) for name, ask in checks.items()]
        self.said: set[str] = set()
        self.rank = 0
        self.skew_limit = options.skew_seconds
        self.skew: float | None = (
            None  # clock of this rank minus the median clock of all ranks, in seconds; None: not compared in this step
        )
        self.asked_at: int | None = None  # step of the last comparison of clocks; None: not compared yet

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        self.rank, self.device = comms.rank, device

    def collective(self, comm: Comm, step: int) -> None:
        """Compare the clocks of all ranks, read just after a barrier, once in `CLOCKS` steps."""
        self.skew = None
        if comm.size == 1 or (self.asked_at is not None and step - self.asked_at < CLOCKS):
            return
        import torch

        self.asked_at = step
        comm.barrier()
        clock = torch.tensor([time.time()], dtype=torch.float64, device=self.device)
        clocks = comm.all_gather(clock).tolist()
        self.skew = clocks[comm.index] - statistics.median(clocks)

    def describe(self) -> str:
        return ", ".join(probe.name for probe in self.probes)

    def explain_unknown(self) -> str:
        """Return the probes without a result, and why; waits up to `PATIENCE` seconds for their first results."""
        until = time.monotonic() + PATIENCE
        while any(probe.why == UNASKED for probe in self.probes) and time.monotonic() < until:
            for probe in self.probes:
                probe.poll()
            time.sleep(0.01)
        return ", ".join(f"{probe.name} ({probe.why})" for probe in self.probes if probe.findings is None)

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        now: set[str] = set()
        host = os.uname().nodename
        if self.skew is not None and abs(self.skew) > self.skew_limit:
            evidence = f"the clock of rank {self.rank} is {self.skew:+.2f} s off the median of all ranks"
            more = {"step": record.step, "row": 1, "host": host, "probe": "clock", "exclude": f"rank {self.rank}"}
            yield Verdict("machine", host, 1.0, evidence, Action.WARN, details=more)
        for probe in self.probes:
            known = probe.findings is not None
            probe.poll()
            details = {"step": record.step, "first": record.step, "row": 1, "host": host, "probe": probe.name}
            details["exclude"] = f"rank {self.rank}"  # not the host name, which may differ from the launcher's
            if known and probe.findings is None:
                evidence = f"the state of {probe.name} is unknown from step {record.step} on: {probe.why}"
                yield Verdict("probe-unknown", host, 1.0, evidence, Action.NOTE, details=details)
            for finding in probe.findings or ():
                now.add(finding.key)
                if finding.key not in self.said:
                    yield Verdict("machine", host, 1.0, f"{probe.name}: {finding.text}", Action.WARN, details=details)
        self.said = now
