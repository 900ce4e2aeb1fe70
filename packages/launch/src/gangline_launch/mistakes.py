"""Report of a user's mistake found before ranks start, for the command that follows the job. Torch-free."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from gangline import UserError


def report_mistake(run_dir: Path, error: UserError, ends: bool = False) -> int:
    """Print a mistake and write it to ending.json; return its exit code. ends: the mistake ends the complete job."""
    print(f"train: {error}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        note_mistake(run_dir, error, ends)
    return error.exit_code


def note_mistake(run_dir: Path, error: UserError, ends: bool = False) -> None:
    """Write the mistake to ending.json, unless other nodes already train or ending.json exists.

    With `ends` the mistake is always written. Other nodes train if events.jsonl is newer than launch/nodes; both mtimes
    come from the shared file system.
    """
    from gangline.run.ending import decide_ending, read_ending, write_ending

    events, began = run_dir / "events.jsonl", run_dir / "launch" / "nodes"
    others_train = events.exists() and began.exists() and events.stat().st_mtime > began.stat().st_mtime
    ending = read_ending(run_dir)
    if run_dir.is_dir() and (ends or (not others_train and ending is None)):
        text = "\n".join((error.what, *error.details))
        number = 0 if ending is None else ending.generation
        write_ending(run_dir, decide_ending(number, text, failure="user", exit_code=error.exit_code))
