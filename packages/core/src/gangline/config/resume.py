"""What may change when a run goes on, and what would make another run of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gangline import attempts
from gangline.checkpoint.id import CheckpointId
from gangline.config.compose import compose_over
from gangline.config.paths import rooted
from gangline.config.programs import untrusted
from gangline.config.schema import LISTS, Run
from gangline.config.serial import from_dict
from gangline.ending import read_ending
from gangline.errors import UserError

# A run is its seed, data, model, optimizer and global batch. How many ranks carry it, along which axes, in which
# precision, who watches it and how long it goes on are not part of that. Nor is where the data lies: every checkpoint
# holds its fingerprint.
MAY_CHANGE = (
    "run.steps",
    "run.device",
    "run.deterministic",
    "run.recompute",
    "run.recompute_every",
    "run.loss_chunk",
    "run.compile",
    "run.sample",
    "run.save_on_signal",
    "batch.micro_size",
    "data.path",
    "data.tokenizer",
    "data.text_field",
    "data.binary",
    "parallel",
    "precision",
    "launch",
    *LISTS,
    "validate",
    "checkpoint.every",
    "checkpoint.at_end",
    "checkpoint.keep_last",
    "checkpoint.frozen",
)


def continued(path: str, content: Mapping[str, Any], words: Sequence[str]) -> tuple[Run, dict[str, Any]]:
    """The run of `content` with the words on top, and what they changed: path -> [before, now].

    Raises UserError where they would make it another run, and where others may have written a program into it.
    """
    run = compose_over(content, words, f"resume={path}", untrusted(path))
    before, now = _leaves(rooted(from_dict(content))), _leaves(rooted(run))
    changed = {
        key: [before.get(key), now.get(key)] for key in {**before, **now} if before.get(key, ...) != now.get(key, ...)
    }
    own = [f"{place}.{name}" for place, config in run.parts() for name in config.layout_options]
    free = [*MAY_CHANGE, *own]
    other = [key for key in changed if not any(key == may or key.startswith((f"{may}.", f"{may}/")) for may in free)]
    if other:
        shown = ", ".join(f"{key} ({changed[key][0]} -> {changed[key][1]})" for key in other)
        remade = ("model", *run.edits)  # other arrays, of which another run holds none
        new_weights = any(key == "optimizer" or key.partition(".")[0] in remade for key in other)
        branch = f"train {shlex.join([f'from={path}', f'weights={path}', *words])}"
        raise UserError(
            f"a run that is resumed keeps its {shown}.",
            "With another one it would be another run.",
            f"These may change: {', '.join(free)}.",
            "" if new_weights else f"A new run with its weights and optimizer state:  {branch}",
            f"A new run with its configuration (new weights):  train {shlex.join([f'from={path}', *words])}",
        )
    return run, changed


def refuse_ended(run: Run, directory: str | Path) -> None:
    """Raise UserError for a finished run without steps to add, where its checkpoints lie in the run directory."""
    ending = read_ending(directory)
    folder = Path(directory, "checkpoints")
    if ending is None or ending.reason != "done" or not folder.is_dir():
        return
    ids = [id for entry in folder.iterdir() if (id := CheckpointId.parse(entry.name))]
    newest = attempts.latest(directory, ids)
    if newest is not None and newest.step >= run.steps:
        raise UserError(
            f"the run has ended: step {newest.step} is done, and run.steps={run.steps}.",
            f"To continue:  train resume={directory} run.steps={2 * newest.step}",
        )


def _leaves(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value by its path; a group's choice under the group's own name."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found.update(_leaves(value, "" if path == "parts" else f"{path}."))
        else:
            found[path] = value
    return found
