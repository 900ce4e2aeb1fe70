"""Hooks of gangline-testkit: the commands `new-plugin` and `conform`, and the kinds of plugins."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Kind, hookimpl
from gangline_testkit.kinds import KINDS


@hookimpl
def gangline_commands() -> Iterable[Command]:
    return (
        Command(
            name="new-plugin",
            run="gangline_testkit.new_plugin:main",
            summary="Write a new plugin package with code and tests",
        ),
        Command(
            name="conform",
            run="gangline_testkit.conform:main",
            summary="Run the conformance suites of a plugin, and print a table",
        ),
    )


@hookimpl
def gangline_kinds() -> Iterable[Kind]:
    return KINDS
