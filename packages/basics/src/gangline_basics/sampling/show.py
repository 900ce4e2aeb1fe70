"""Print a text by the finished model of a run, the last thing that `train` prints."""

from __future__ import annotations

import shlex
import sys

from gangline.errors import UserError
from gangline_basics.sampling.sampler import Sampler


def show_sample(run_dir: str, tokens: int) -> None:
    """Print what the finished model writes, where its data is text."""
    try:
        (text,) = Sampler(run_dir, usual=tokens).write([""])
    except UserError:
        return
    except Exception as error:  # the run is done, whatever a model on one device comes to
        print(f"train: no sample: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return
    print(f"\n{text.text}\n\nmore: gangline sample {shlex.quote(str(run_dir))} --prompt 'def '", flush=True)
