"""ending.json: why a run's job ended, for schedulers and tools. Torch-free.

Replaced whole at each end, removed at each start: where it is missing, the job lives or was killed. Between two starts
of an elastic job it says how the ranks of the first one ended.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gangline.run_files import read_regular

FILE = "ending.json"
VERSION = 1
EXIT_REQUEUE = 75  # saved, and to be started again: EX_TEMPFAIL of sysexits.h


@dataclass(frozen=True, kw_only=True)
class RunEnding:
    """How the job of a run ended.

    generation  the start of the ranks that was the last, see `gangline.run.generation`
    reason      "done", "bug" (a rank failed), "mistake" (the user's), "verdict" (a stop), "restart" (a verdict asks for
                new workers, and no restart is left), "preempted" (a signal, and saved), "signal" (and not saved),
                "killed" (a rank or node was lost and could not be started again)
    exclude     names of nodes that are to have no part in the next start
    requeue     whether the same command, given again, may get further
    exit_code   of the command
    evidence    in words
    """

    generation: int
    reason: str
    exit_code: int
    requeue: bool = False
    exclude: tuple[str, ...] = ()
    evidence: str = ""
    version: int = VERSION


def write_ending(run_dir: str | Path, ending: RunEnding) -> None:
    """Put it in the place of an earlier one. A full disk hides no error that ended the run: it is then missing."""
    from gangline.run.directory import write_whole

    try:
        write_whole(Path(run_dir) / FILE, json.dumps(asdict(ending), indent=2) + "\n")
    except OSError:
        clear_ending(run_dir)


def read_ending(run_dir: str | Path) -> RunEnding | None:
    """How the newest job of a run ended; None where it lives, was killed, or has never ended."""
    try:
        content = json.loads(read_regular(Path(run_dir) / FILE))
        known = {key: content[key] for key in content if key in RunEnding.__dataclass_fields__}
        ending = RunEnding(**{**known, "exclude": tuple(known["exclude"])})
        return ending if isinstance(ending.reason, str) and isinstance(ending.evidence, str) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def clear_ending(run_dir: str | Path) -> None:
    """At each start."""
    (Path(run_dir) / FILE).unlink(missing_ok=True)
