"""Small runs for suites: a small model and fast parts, with further settings as a user types them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from gangline.config.defaults import get_default_choices
from gangline.config.schema import Run
from gangline.config.serial import from_dict
from gangline.plugin.hooks import LISTS
from gangline.plugin.registry import installed

SMALL = (
    "model=decoder",
    "model.vocab_size=61",
    "model.dim=24",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_dim=40",
    "model.qk_norm=true",
    "checkpoint=off",
    "batch.global_size=8",
    "batch.micro_size=1",
    "batch.sequence_length=12",
    "run.deterministic=true",
    "run.steps=20",
    "run.seed=7",
    "run.sample=0",
    "validate.every=null",
)


def build_small_run(*settings: str) -> Run:
    """Return a small run with these settings; later settings win. Raises UserError as `train` does."""
    return from_dict(parse_settings([*SMALL, *settings]))


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Return the plain data (nested dicts) of a run with these settings."""
    parts: dict[str, Any] = {**get_default_choices(), "track": []}
    values: dict[str, Any] = {"parts": parts}
    groups = installed().list_groups()
    for setting in settings:
        key, _, text = setting.partition("=")
        if key in LISTS:
            parts[key] = [name.strip() for name in text.strip("[]").split(",") if name.strip()]
        elif key in groups:
            parts[key] = text
        else:
            place = values
            *way, last = key.split(".")
            for step in way:
                place = place.setdefault(step, {})
            place[last] = yaml.safe_load(text)
    return values
