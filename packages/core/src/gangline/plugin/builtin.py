"""Core's own plugin: its verbs. Registered as any other plugin is."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.plugin.hooks import Command, hookimpl


@hookimpl
def gangline_commands() -> Iterable[Command]:
    return (
        Command(
            name="plugins", run="gangline.cli.plugins:main", summary="What is installed, who supplies it, what failed"
        ),
        Command(name="runs", run="gangline.cli.runs:main", summary="The runs in a folder: where each stands"),
        Command(name="compare", run="gangline.cli.compare:main", summary="What differs between runs, and their curves"),
    )
