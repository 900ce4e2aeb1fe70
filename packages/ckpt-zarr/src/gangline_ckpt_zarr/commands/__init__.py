"""`gangline ckpt`: list, check, compare, copy and convert checkpoints. Nothing here imports torch at module level.

Each command is a module that is imported when it is called, so that listing takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline import BadCheckpoint, UserError
from gangline.cli.verbs import run_verb

VERBS = {
    "ls": "list checkpoints with step, size, age, tiers and state",
    "show": "show the arrays, shapes, chunks, sharding and metadata of a checkpoint",
    "verify": "read every byte of a checkpoint and report every bad chunk",
    "diff": "compare two checkpoints, array by array",
    "copy": "copy a checkpoint to another store; --open writes native zarr, for any zarr reader",
    "refs": "write refs.json, so that stock zarr opens a checkpoint without a copy",
    "prune": "delete the checkpoints that retention does not keep",
    "export": "write the model of a checkpoint as a Hugging Face directory",
    "average": "write the mean of several checkpoints' weights as a checkpoint to start from",
    "import": "convert a Hugging Face directory to a checkpoint to start from",
}

NAMED = "Name a checkpoint as RUN_DIR (the newest of the run), RUN_DIR step-00000012, its directory, or its URL."


def main(argv: Sequence[str]) -> int:
    """Run a command of `gangline ckpt`; return 1 if something is damaged or differs, else 0. Raises UserError."""
    try:
        return run_verb("ckpt", VERBS, __name__, argv, NAMED)
    except BadCheckpoint as bad:
        print(bad)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(f"{error.strerror or error}{where}.") from error
