"""Write the page of commands: the `--help` of `train`, of `gangline`, and of every subcommand."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from unittest import mock

from gangline.cli.main import main
from gangline.plugin.registry import installed

COLUMNS = 100  # width at which argparse wraps its help

TOP = """\
# Commands

`train` starts and resumes runs, and `gangline` does all else. The help of each command follows as `--help` prints it
with all packages installed. `train --help` lists the groups; [Options](options.md) lists what can be set.

## Exit codes

| code | `train` | `gangline` |
|---|---|---|
| 0 | done | done |
| 1 | a bug or a lost rank, and no restart is left | the answer is bad, see below; or a bug |
| 2 | a mistake of the user: one message says what, why and what to type | the same |
| 3 | stopped by the verdict of a [health check](how-to/health.md) | |
| 75 | saved or too few nodes: the same command continues | |
| 130 | Ctrl-C | Ctrl-C |
| 128 + n | signal n | |

`gangline ckpt ls`, `verify` and `prune` return 1 if a checkpoint is damaged, `ckpt diff` if checkpoints differ,
`data verify` if a store is damaged, `conform` if a part fails its suite, and `data prepare` if a disk or a machine
fails.
[Exit codes of runs](how-to/exit-codes.md) says more about jobs.
"""


def page() -> str:
    """Return the text of docs/commands.md."""
    found = [TOP]
    for verb in installed().get_commands():
        text = read_help([verb])
        found += [f"## gangline {verb}", "", *fence(text)]
        for second in dict.fromkeys(list_inner(verb, text)):
            found += [f"### gangline {verb} {second}", "", *fence(read_help([verb, second]))]
    return "\n".join(found)


def read_help(words: list[str]) -> str:
    """Return what `gangline WORDS --help` prints."""
    out = io.StringIO()
    narrow = mock.patch.dict(os.environ, COLUMNS=str(COLUMNS))
    with narrow, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return out.getvalue().strip()


def list_inner(verb: str, text: str) -> Iterator[str]:
    """Yield the subcommands of a command, as listed in its help."""
    yield from re.findall(rf"gangline {verb} ([a-z][\w-]*)", text)
    if re.search(rf"gangline {verb} VERB", text):
        yield from re.findall(r"^  ([a-z][\w-]*) {2,}\S", text, re.MULTILINE)


def fence(text: str) -> list[str]:
    """Return a text as the lines of a fenced block."""
    return ["```text", *text.splitlines(), "```", ""]
