"""Counts of a pod's consecutive exits with 75 without a new step, in RUN_DIR/launch/tries-INDEX.json. Torch-free.

An exit with 75 does not count as a failure of the Job, so Kubernetes alone would restart such a pod without limit. If
one pod never starts, all other pods wait, exit with 75, restart and keep their GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

from gangline import UserError
from gangline.run.ending import read_ending
from gangline.storage.files import read_regular, write_whole
from gangline_launch import job as jobs
from gangline_launch.slurm.requeues import read_highest_step


def forget(run_dir: Path) -> None:
    """Remove the counts of earlier submits."""
    for path in jobs.make_launch_folder(run_dir).glob("tries-*.json"):
        path.unlink(missing_ok=True)


def count(run_dir: Path, index: str) -> tuple[int, int]:
    """Count an exit of the pod with 75; return (number of consecutive exits without a new step, highest step)."""
    path, step = jobs.make_launch_folder(run_dir) / f"tries-{index}.json", read_highest_step(run_dir)
    try:
        before, tries = json.loads(read_regular(path))
    except (OSError, ValueError, TypeError):
        before, tries = step, 0
    tries = 1 if step > before else tries + 1
    write_whole(path, json.dumps([step, tries]) + "\n")
    return tries, step


def refuse_more(run_dir: Path, index: str, most: int) -> None:
    """Count an exit of the pod with 75. Raises UserError at the `most`-th consecutive exit without a new step."""
    tries, step = count(run_dir, index)
    if tries < max(1, most):
        return
    ending = read_ending(run_dir)
    raise UserError(
        f"pod {index} exited with 75 {tries} times without progress past step {step} (launch.futile_requeues).",
        *(ending.evidence.splitlines()[:1] if ending is not None else []),
        "A pod that never starts makes all other pods wait. To find the reason:  kubectl describe pods",
        "If pods start slowly:  launch.join_seconds=900",
    )
