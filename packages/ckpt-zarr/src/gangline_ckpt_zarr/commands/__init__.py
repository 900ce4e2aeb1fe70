"""`gangline ckpt`: list, check, compare, copy and convert checkpoints. Nothing here imports torch at module level.

Each command is a module that is imported when it is called, so that listing takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline import BadCheckpoint, UserError
from gangline.cli.verbs import run_verb

VERBS = {
    "ls": "checkpoints with step, size, age, tiers and state",
    "show": "what is in one: arrays, shapes, chunks, cuts, the document",
    "verify": "read every byte and name every bad chunk",
    "diff": "compare two, array by array",
    "copy": "to another store; --open: as any zarr reader opens it",
    "refs": "write refs.json, through which stock zarr opens one as it is",
    "prune": "delete what need not be kept",
    "export": "the model as a Hugging Face directory",
    "average": "the mean of several checkpoints' weights as one to start from",
    "import": "a Hugging Face directory as a checkpoint to start from",
}

NAMED = (
    "A checkpoint is named by its run, RUN_DIR (the newest) or RUN_DIR step-00000012, by its directory, or by a URL."
)


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
