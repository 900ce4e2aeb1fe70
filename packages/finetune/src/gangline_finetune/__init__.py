"""Fine-tuning of a model: LoRA, chat data, preferences (DPO) and evaluation; hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Part, hookimpl
from gangline_finetune import parts


@hookimpl
def gangline_model_edits() -> Iterable[Part]:
    return parts.EDITS


@hookimpl
def gangline_callbacks() -> Iterable[Part]:
    return parts.CALLBACKS


@hookimpl
def gangline_data_sources() -> Iterable[Part]:
    return parts.SOURCES


@hookimpl
def gangline_commands() -> Iterable[Command]:
    run = "gangline_finetune.evaluate.command:main"
    return (Command(name="eval", run=run, summary="Evaluate the model of a run on lm-eval tasks"),)
