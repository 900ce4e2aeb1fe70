"""Shell lines for the entries of `launch.setup`, and the report of a failed entry. Torch-free.

python -m gangline_launch.setup RUN_DIR ENTRY
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from gangline import Problem, UserError


def check_exit_codes(entries: Iterable[str], python: str, run_dir: str) -> list[str]:
    """Return shell lines: each entry, then a check of its exit code. python, run_dir: quoted for the shell."""
    lines = []
    for entry in entries:
        failure_command = f"{python} -P -m gangline_launch.setup {run_dir} {shlex.quote(entry)}"
        lines += [entry, f"[ $? -eq 0 ] || {{ {failure_command}; exit 2; }}"]
    return lines


def find_setup_problems(entries: Iterable[str]) -> list[Problem]:
    """Return problems of entries that are not complete bash commands, which would absorb the script's next line."""
    bash = shutil.which("bash")
    problems = []
    for entry in entries if bash else ():
        read = subprocess.run([str(bash), "-n", "-c", entry], capture_output=True, text=True)
        message = " ".join(read.stderr.split()) or (
            "the entry ends with a backslash" if re.search(r"\\\s*$", entry) else ""
        )
        if message:
            what = f"launch.setup contains {entry!r}, which is not a complete bash command."
            problems.append(
                Problem(what, message, "Write a command of several lines, such as if ... fi, as one entry.")
            )
    return problems


def main(run_dir: str, entry: str) -> int:
    """Report which entry failed, here and in ending.json; return the exit code for a user's mistake."""
    from gangline_launch.mistakes import report_mistake

    error = UserError(
        f"launch.setup failed: {entry}",
        f"The output of the command is in {run_dir}/launch. The job ends, because ranks need this setup.",
        "To ignore the failure:  'launch.setup=[COMMAND || true]'",
    )
    return report_mistake(Path(run_dir), error, ends=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
