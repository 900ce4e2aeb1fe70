"""Start of a run from another run's weights and optimizer state (`run.weights`), with its checks. Torch-free."""

from __future__ import annotations

from pathlib import Path

from gangline.checkpoint.id import CheckpointId
from gangline.config.schema import Run
from gangline.errors import Problem, UserError
from gangline.plugin.registry import installed
from gangline.run.directory import RunDirectory


def start_of(run: Run) -> tuple[RunDirectory, CheckpointId | None] | None:
    """Return (run directory, checkpoint) that `run.weights` names; checkpoint None: the latest one of the run.

    The option may be RUN_DIR, RUN_DIR/step-00000020 or RUN_DIR/checkpoints/step-00000020. Returns None if it
    is unset. Raises UserError if the run directory does not exist.
    """
    if run.job.weights is None:
        return None
    path = Path(run.job.weights).expanduser()
    id = CheckpointId.parse(path.name)
    if id is not None:
        path = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return RunDirectory.open(path), id


def find_start_problems(run: Run) -> list[Problem]:
    """Return why a new run cannot start from `run.weights`, such as a different optimizer; [] for a resumed run."""
    directory = run.job.dir
    if run.job.weights is None or (directory is not None and RunDirectory(directory).config.exists()):
        return []  # a resumed run loads its own checkpoint
    try:
        start = start_of(run)
        assert start is not None
        theirs = start[0].read_content().get("parts", {}).get("optimizer")
    except UserError as error:
        return [Problem(f"weights={run.job.weights}: {error.what}", *error.details[:2])]
    ours = installed().find_part(run.optimizer).part.name
    if theirs == ours:
        return []
    return [
        Problem(
            f"weights={run.job.weights} was trained with optimizer={theirs}, and this run has optimizer={ours}.",
            "An optimizer cannot use the state of another optimizer.",
            f"Choose optimizer={theirs}. To start from the weights only:  gangline export {start[0].path} DIR, then "
            "train model.weights=DIR",
        )
    ]
