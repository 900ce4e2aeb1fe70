"""Checkpoints in zarr v3 for gangline: hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Part, hookimpl
from gangline_ckpt_zarr.config import ZarrCheckpoint


@hookimpl
def gangline_checkpointers() -> Iterable[Part]:
    return [
        Part(
            name="zarr",
            config=ZarrCheckpoint,
            build="gangline_ckpt_zarr.checkpointer:build",
            summary="Sharded, asynchronous, checksummed zarr v3 checkpoints, for any layout and any zarr reader",
        )
    ]


@hookimpl
def gangline_commands() -> Iterable[Command]:
    return [
        Command(
            name="ckpt",
            run="gangline_ckpt_zarr.commands:main",
            summary="List, check, compare, copy and convert checkpoints",
        )
    ]
