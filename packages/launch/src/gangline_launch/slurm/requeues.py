"""Log of the starts of a run's jobs, RUN_DIR/launch/requeues.jsonl: result and next action. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gangline.record import read_records
from gangline.storage.files import open_own, read_regular
from gangline_launch import job as jobs

FILE = "requeues.jsonl"
BEGIN = "begin"


@dataclass(frozen=True)
class JobRequeue:
    """A line of requeues.jsonl: a start of the job ended at step `step`, and the next action.

    then  next action: "requeue", "submit" (a new job without the nodes in `exclude`) or "end"; "begin" instead marks a
          submit by the user, after which earlier lines are ignored
    """

    time: float
    job: str
    step: int
    code: int
    reason: str
    then: str
    exclude: tuple[str, ...] = ()


def read(run_dir: Path) -> list[JobRequeue]:
    """Return the lines since the user last submitted the run, oldest first; skip torn or unreadable lines."""
    path = Path(run_dir, jobs.FOLDER, FILE)
    requeues: list[JobRequeue] = []
    for line in read_regular(path).splitlines() if path.exists() else []:
        try:
            content = json.loads(line)
            one = JobRequeue(**{**content, "exclude": tuple(content.get("exclude", ()))})
        except (ValueError, TypeError, AttributeError):
            continue
        requeues = [one] if one.then == BEGIN else [*requeues, one]
    return requeues


def append(run_dir: Path, line: JobRequeue) -> None:
    """Append a line, on a new line even after an incomplete one."""
    path = jobs.make_launch_folder(run_dir) / FILE
    torn = path.exists() and not read_regular(path).endswith(b"\n")
    with open_own(path, "a") as file:
        file.write("\n" * torn + json.dumps(asdict(line)) + "\n")


def read_excluded_nodes(lines: list[JobRequeue]) -> set[str]:
    """Return the nodes that the newest job excludes."""
    return {name for line in lines if line.then in (BEGIN, "submit") for name in line.exclude}


def read_highest_step(run_dir: Path) -> int:
    """Return the highest step that the run has recorded; 0 if none."""
    path = run_dir / "metrics.jsonl"
    return max((record["step"] for record in (read_records(path) if path.exists() else [])), default=0)
