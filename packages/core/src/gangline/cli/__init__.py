"""The commands `train` and `gangline <verb>`. No module here imports torch or Hydra at import time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gangline.cli.terminal import escape_streams
from gangline.errors import UserError, escape_controls

if TYPE_CHECKING:
    from rich.console import Console

EXIT_INTERRUPTED = 130


def run_guarded(program: str, body: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command's body and return its exit code; print a UserError as one message, keep a bug's traceback."""
    with escape_streams():
        return _run_guarded(program, body, argv)


def _run_guarded(program: str, body: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    try:
        return body(argv)
    except UserError as error:
        print(f"{program}: {escape_controls(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader is gone (| head): the flush at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED


def make_notes(program: str) -> Callable[[str], None]:
    """Return a function that prints a note of the command `program` on stderr, apart from its output on stdout."""
    return lambda text: print(f"{program}: note: {escape_controls(text)}", file=sys.stderr, flush=True)


def open_console() -> Console:
    """Return a console for tables, as wide as the terminal, or 200 columns if the output is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)
