"""Flags of commands that also take Hydra overrides: `gangline plan parallel=3d --tokens 15e12`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from gangline.config.suggest import suggest_near
from gangline.errors import UserError

MOST = 1e24  # maximum number that a flag accepts


class Flags(argparse.ArgumentParser):
    """Argument parser that raises UserErrors and rejects abbreviated flags. command: for example "plan search"."""

    def __init__(self, command: str, text: str, more: str = "") -> None:
        super().__init__(
            prog=f"gangline {command}",
            description=text,
            epilog=more,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add_number(self, flag: str, example: str, text: str, *, integer: bool = False, **more: Any) -> None:
        """Add a flag that takes a number above 0."""

        def convert_number(text: str) -> float | int:
            try:
                number = float(text)
            except ValueError:
                number = 0.0
            if not number > 0:
                raise UserError(f"{flag} {text}: expected a number above 0.", f"Example:  {flag} {example}")
            if not 1 / MOST <= number <= MOST:
                raise UserError(f"{flag} {text}: expected a number between {1 / MOST:g} and {MOST:g}.")
            if integer and number != int(number):
                raise UserError(f"{flag} {text}: expected an integer.")
            return int(number) if integer else number

        self.add_argument(flag, type=convert_number, metavar="N", help=text, **more)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the parsed flags and arguments, which may be in any order. Raises UserError for an unknown flag."""
        options, unknown = self.parse_known_intermixed_args(list(argv))
        for word in unknown:
            if not word.startswith("-"):
                raise UserError(f"unexpected argument {word}.", self.format_usage_line())
            flags = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            nearest = suggest_near(word.partition("=")[0], flags)
            raise UserError(f"there is no flag {word}.", nearest, f"Flags: {', '.join(flags)}.")
        return options

    def format_usage_line(self) -> str:
        """Return the usage message on one line."""
        return " ".join(self.format_usage().split())

    def error(self, message: str) -> NoReturn:
        """Raise UserError for an error message of argparse."""
        match = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
        if match is None:
            raise UserError(f"{message}.", self.format_usage_line())
        flag, what = match.groups()
        raise UserError(f"{flag} needs a value." if what == "expected one argument" else f"{flag}: {what}.")
