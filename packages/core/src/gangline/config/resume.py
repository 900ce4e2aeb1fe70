"""Configuration of the run that `train resume=` continues, with the changes of the command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gangline.checkpoint.id import CheckpointId
from gangline.config.compose import compose_over
from gangline.config.identity import find_changes, free_options, is_within
from gangline.config.paths import resolve_paths
from gangline.config.programs import explain_distrust
from gangline.config.schema import Run
from gangline.config.serial import from_dict
from gangline.errors import UserError
from gangline.run import attempts
from gangline.run.ending import read_ending


def continue_run(path: str, content: Mapping[str, Any], words: Sequence[str]) -> tuple[Run, dict[str, Any]]:
    """Return the run of `content` with the overrides `words`, and their changes: path -> [before, now].

    Raises UserError if the changes would make it a different run, or if others may have put a program into `content`.
    """
    run = compose_over(content, words, f"resume={path}", explain_distrust(path))
    changes = find_changes(resolve_paths(from_dict(content)), resolve_paths(run))
    free = free_options(run)
    other = [key for key in changes if not is_within(key, free)]
    if other:
        differences = ", ".join(f"{key} ({changes[key][0]} -> {changes[key][1]})" for key in other)
        remade = ("model", *run.edits)  # a change here changes the arrays of checkpoints
        new_weights = any(key == "optimizer" or key.partition(".")[0] in remade for key in other)
        branch = f"train {shlex.join([f'from={path}', f'weights={path}', *words])}"
        raise UserError(
            f"a resumed run cannot change {differences}.",
            "These options define the run.",
            f"Options that may change: {', '.join(free)}.",
            "" if new_weights else f"A new run with its weights and optimizer state:  {branch}",
            f"A new run with its configuration (new weights):  train {shlex.join([f'from={path}', *words])}",
        )
    return run, changes


def refuse_ended(run: Run, directory: str | Path) -> None:
    """Raise UserError if `run.steps` adds no step to a finished run, or is below the step of a run's checkpoint."""
    ending, folder = read_ending(directory), Path(directory, "checkpoints")
    if not folder.is_dir():
        return
    done = ending is not None and ending.reason == "done"
    ids = [id for entry in folder.iterdir() if (id := CheckpointId.parse(entry.name))]
    newest = attempts.find_latest(directory, ids)
    if newest is not None and (newest.step > run.steps or (done and newest.step == run.steps)):
        raise UserError(
            f"the run has ended: step {newest.step} is done, and run.steps={run.steps}.",
            f"To continue:  train resume={directory} run.steps={2 * newest.step}",
        )
