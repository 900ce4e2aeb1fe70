"""Errors that a user sees: user mistakes, problems of a configuration, and the message of a damaged checkpoint
(`BadCheckpoint`).

A mistake of the user is a `UserError`: one message, exit code 2, no traceback. Any other exception is a
bug and keeps its traceback.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

EXIT_USER_ERROR = 2
RAISED = (Exception, SystemExit)  # exceptions of third-party code: a library may end the process with SystemExit


@dataclass(frozen=True)
class Problem:
    """One problem of a run, found before any process starts.

    ``check(run)`` of a part returns problems; core shows all problems of a run at once.
    """

    what: str  # the problem, with the options as the user typed them: "batch.micro_size=3 does not divide 8."
    why: str = ""  # the reason
    fix: str = ""  # the command or setting that fixes it

    def format_details(self) -> list[str]:
        """Return the lines below `what`."""
        return [*self.why.splitlines(), *self.fix.splitlines()]


class UserError(Exception):
    """A mistake that the user can fix: `what`, then indented lines with the reason, the command or the choices."""

    exit_code = EXIT_USER_ERROR

    def __init__(self, what: str, *details: str) -> None:
        self.what = what
        self.details = tuple(line for line in details if line)
        super().__init__("\n  ".join((what, *self.details)))

    def __reduce__(self) -> tuple:
        return UserError, (self.what, *self.details)

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> UserError:
        """Return one error that shows all problems, numbered if there are several, and each listing once."""
        problem_list = list(problems)
        if len(problem_list) == 1:
            return cls(problem_list[0].what, *problem_list[0].format_details())
        lines: list[str] = []
        for number, problem in enumerate(problem_list, 1):
            details = (f"   {line}" for line in problem.format_details())
            lines += [f"{number}. {problem.what}", *(line for line in details if len(line) < 60 or line not in lines)]
        return cls(f"{len(problem_list)} problems:", *lines)

    def to_problem(self) -> Problem:
        """Return the error as a problem, which can be shown together with other problems."""
        return Problem(self.what, "\n".join(self.details))


def escape_controls(text: str) -> str:
    """Escape control characters except line breaks and tabs, so that text from a file cannot control a terminal."""
    return "".join(repr(sign)[1:-1] if _is_control(sign) else sign for sign in text)


def _is_control(sign: str) -> bool:
    return sign not in "\n\t" and unicodedata.category(sign) in ("Cc", "Cf", "Cs")


class BadCheckpoint(Exception):
    """Error of stored bytes that are missing or differ from the bytes that were written.

    `array` is the global array's name, `box` the damaged part as ((start, stop), ...) per
    dim, or None for the full array, and `file` the path of the stored bytes.
    """

    def __init__(self, array: str, box: tuple[tuple[int, int], ...] | None, file: str | Path, why: str = "") -> None:
        self.array, self.box, self.file, self.why = array, box, str(file), why
        where = "" if box is None else "[" + ", ".join(f"{a}:{b}" for a, b in box) + "]"
        super().__init__(f"{array}{where} in {file} is damaged" + (f": {why}" if why else ""))

    def __reduce__(self) -> tuple:
        """Return the arguments for pickle, because ranks send this error to each other."""
        return BadCheckpoint, (self.array, self.box, self.file, self.why)


class PeerFailed(RuntimeError):
    """Error of a rank whose peer failed and reported its own error, which is shown instead of this one."""
