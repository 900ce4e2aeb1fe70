"""Monitor of starts that fail repeatedly at the same step, which a restart alone does not fix. Torch-free.

Before the first step of a start, the monitor reads the logs of earlier starts in the run directory. A failure that
repeats at the same step has its cause in the data that ranks read (the checkpoint, a batch), which an older checkpoint
may fix, or in a lack of memory, which only other options fix.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.checkpoint.id import CheckpointId
from gangline.health import Action, Verdict
from gangline.run import attempts
from gangline.run.events import read_events
from gangline.storage.files import open_regular
from gangline_health.monitors.base import Monitor

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comms, Store
    from gangline.record import StepRecord
    from gangline.runtime import Runtime

# out-of-memory messages of torch on a GPU, torch on a CPU, and Python
NO_MEMORY = re.compile(r"OutOfMemoryError|out of memory\. Tried|can't allocate memory|\bMemoryError\b")
MORE_MEMORY = (
    "A restart does not free memory: lower batch.micro_size, set run.recompute=full or run.loss_chunk, or shard the "
    "model over more ranks"
)
SAME = 1  # tolerance in steps: a kill may prevent the record of the previous step
NEWEST_BYTES = 1 << 22  # maximum number of bytes to read from the end of metrics.jsonl

Line = dict[str, Any]


@dataclass(frozen=True)
class Repeated:
    """Consecutive starts that failed at the same step.

    times      number of consecutive starts
    step       last step that the newest of these starts completed
    why        reason of the last failure
    no_memory  number of consecutive out-of-memory failures, counted back from the last failure
    """

    times: int
    step: int
    why: str
    no_memory: int


class RepeatedMonitor(Monitor):
    """Monitor that reports before the first step if earlier starts failed repeatedly at the same step."""

    name = "repeated"

    def __init__(self, run_dir: str | None, save_every: int | None) -> None:
        self.run_dir, self.save_every = run_dir, save_every
        self.rank = 0

    def describe(self) -> str:
        return "starts that fail at the same step"

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        self.rank = comms.rank

    def before_run(self) -> Iterable[Verdict]:
        if self.run_dir is None or self.rank:
            return
        events = read_events(self.run_dir)
        launches = [line for line in events if line.get("event") == "launch"]
        if not launches or not launches[-1].get("futile"):  # the previous start completed new steps
            return
        failure = find_repeated(launches, count_reached(events, read_newest_records(Path(self.run_dir))))
        if failure is None:
            return
        step = failure.step + 1
        short = failure.no_memory >= 2  # a single out-of-memory failure may be a consequence of the failure before
        times = failure.no_memory if short else failure.times
        details = {"step": step, "row": times}
        evidence = f"{times} consecutive starts failed in step {step}; last failure: {failure.why or 'unknown'}"
        if short:
            evidence += f". {MORE_MEMORY}"
            yield Verdict("out-of-memory", f"step {step}", 0.9, evidence, Action.WARN, details=details)
        else:
            details["first"] = self._find_first_untrusted()
            yield Verdict("repeated-failure", f"step {step}", 0.8, evidence, Action.WARN, details=details)

    def _find_first_untrusted(self) -> int:
        """Return the first step whose checkpoints are not trusted: the step of the checkpoint that this start read.

        If that step is not a multiple of `checkpoint.every`, its checkpoint is from a tier that holds only the newest
        steps. Then only checkpoints up to the last multiple of `checkpoint.every` are trusted, which are stored
        elsewhere.
        """
        lines = attempts.read(self.run_dir or ".")
        id = CheckpointId.parse(lines[-1].start or "") if lines else None
        start_step, every = 0 if id is None else id.step, self.save_every
        return max(1, start_step // every * every + 1 if every and start_step % every else start_step)

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        return ()


def find_repeated(launches: Sequence[Line], reached: dict[int, int]) -> Repeated | None:
    """Return the newest consecutive failures at the same step, or None. reached: generation -> last completed step."""
    step, whys = None, list[str]()
    for earlier, line in reversed([*pairwise(launches)]):
        before = int(earlier["generation"])
        if not _is_failure(line) or before not in reached:
            break
        step = reached[before] if step is None else step
        if abs(reached[before] - step) > SAME:
            break
        whys.append(str(line.get("evidence", "")))
    if step is None or len(whys) < 2:
        return None
    no_memory = len(list(takewhile(NO_MEMORY.search, whys)))
    return Repeated(len(whys), step, whys[0], no_memory)


def _is_failure(line: Line) -> bool:
    """Return whether a launch follows a failure of ranks, in the same job or in the previous job."""
    return line.get("why") == "rank" or (line.get("why") == "start" and line.get("after") in ("bug", "killed"))


def count_reached(events: Iterable[Line], steps: Iterable[Line]) -> dict[int, int]:
    """Return {generation: last completed step}, from the log lines of rank 0.

    For a start that rolled back, only records after its last rollback count: earlier lines are of an abandoned branch.
    """
    step_counts: dict[int, int] = {}
    last_attempts: dict[int, int] = {}  # generation -> attempt that its last rollback ended
    rank_lines = [line for line in events if line.get("by") == "rank"]
    for line in rank_lines:
        if line.get("event") == "response" and line.get("action") == "roll_back":
            with suppress(KeyError, TypeError, ValueError):
                last_attempts[int(line["generation"])] = int(line["attempt"])
    for line in (*(each for each in rank_lines if each.get("generation") not in last_attempts), *steps):
        with suppress(KeyError, TypeError, ValueError):
            number, step = int(line["generation"]), int(line["step"])
            if number in last_attempts and int(line["attempt"]) <= last_attempts[number]:
                continue
            step_counts[number] = max(step, step_counts.get(number, 0))
    return step_counts


def read_newest_records(run_dir: Path) -> list[Line]:
    """Return the last step records of metrics.jsonl, without incomplete lines; [] if it cannot be read."""
    path, records = run_dir / "metrics.jsonl", []
    with suppress(OSError), open_regular(path, sys.maxsize) as file:
        file.seek(max(0, path.stat().st_size - NEWEST_BYTES))
        for text in file.read().splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                records += [line] if isinstance(line, dict) else []
    return records
