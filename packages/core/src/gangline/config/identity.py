"""Options that define a run, and options that may change on a resume. Imports neither torch nor Hydra."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gangline.config.schema import Run
from gangline.config.serial import to_dict
from gangline.plugin.hooks import LISTS

# Seed, data, model, optimizer and global batch define a run. The number of ranks, their axes, the precision, trackers,
# health checks and the number of steps do not, nor does the data's path: checkpoints store a fingerprint of the data.
MAY_CHANGE = (
    "run.steps",
    "run.device",
    "run.deterministic",
    "run.recompute",
    "run.recompute_every",
    "run.loss_chunk",
    "run.compile",
    "run.gc_every",
    "run.sample",
    "run.save_on_signal",
    "batch.micro_size",
    "data.path",
    "data.tokenizer",
    "data.text_field",
    "data.binary",
    "parallel",
    "gradients",
    "precision",
    "launch",
    *LISTS,
    "validate",
    "checkpoint.every",
    "checkpoint.at_end",
    "checkpoint.keep_last",
    "checkpoint.save_frozen",
)
_CARRIES = ("run", "validate", "checkpoint")  # sections that do not define a run, except run.seed


def free_options(run: Run) -> list[str]:
    """Return the options and groups that may change when this run continues."""
    own = [f"{place}.{name}" for place, config in run.iterate_parts() for name in config.layout_options]
    return [*MAY_CHANGE, *own]


def is_within(option: str, places: Iterable[str]) -> bool:
    """Return whether an option is in `places`, or belongs to an option or group in `places`."""
    return any(option == place or option.startswith((f"{place}.", f"{place}/")) for place in places)


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return option -> [value before, value now] for two runs as plain data; None stands for a missing option.

    The choice of a group has the group's name as its key.
    """
    old, new = _flatten(before), _flatten(now)
    return {key: [old.get(key), new.get(key)] for key in {**old, **new} if old.get(key, ...) != new.get(key, ...)}


def find_redefined(stored: Mapping[str, Any], run: Run) -> dict[str, list[Any]]:
    """Return option -> [value stored in a checkpoint, value now], for changed options that define the run.

    Excludes paths of files, whose content is compared instead, and options that only one of the two releases has.
    """
    files = [f"{place}.{name}" for place, config in run.iterate_parts() for name in config.file_options]
    exemptions = [*free_options(run), *files, *_CARRIES]
    now = json.loads(json.dumps(to_dict(run)))  # in the form that a checkpoint stores
    both = find_changes(stored, now)
    common_paths = {*_flatten(stored)} & {*_flatten(now)}
    return {
        key: both[key] for key in both if key in common_paths and (key == "run.seed" or not is_within(key, exemptions))
    }


def _flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return path -> value; the choice of a group has the group's name as its path."""
    leaves: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves.update(_flatten(value, "" if path == "parts" else f"{path}."))
        else:
            leaves[path] = value
    return leaves
