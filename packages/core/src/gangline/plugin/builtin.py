"""Core's own plugin: it offers core's verbs and is registered like any other plugin."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.plugin.hooks import Command, hookimpl


@hookimpl
def gangline_commands() -> Iterable[Command]:
    yield Command(
        name="plugins",
        run="gangline.cli.plugins:main",
        summary="List the installed parts, their packages, and failed plugins",
    )
