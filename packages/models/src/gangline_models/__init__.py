"""Model families and edits of models: hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Part, hookimpl
from gangline_models import parts
from gangline_models.rope import parts as rope


@hookimpl
def gangline_models() -> Iterable[Part]:
    return parts.MODELS


@hookimpl
def gangline_model_edits() -> Iterable[Part]:
    return parts.EDITS


@hookimpl
def gangline_parts() -> Iterable[Part]:
    return rope.PARTS


@hookimpl
def gangline_commands() -> Iterable[Command]:
    where = "gangline_models.hugging_face.commands"
    yield Command(
        name="export", run=f"{where}:export_run", summary="Export the model of a run as a Hugging Face directory"
    )
    yield Command(
        name="import",
        run=f"{where}:import_model",
        summary="Print the train command that starts from a Hugging Face directory",
    )
