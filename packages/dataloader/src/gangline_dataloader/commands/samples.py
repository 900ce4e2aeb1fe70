"""`gangline data samples RUN_DIR --step K [--json]`: list the samples and documents of a training step.

    {"version": 1, "run_dir": "runs/a", "step": 3, "attempt": 1, "sequence_length": 128, "global_size": 16,
     "first_sample": 32, "samples": [
       {"sample": 32, "source": "web", "epoch": 0, "row": 17, "first_token": 2176, "documents": [3, 4]}, ...]}

`sample` is the sample's number in the run, the number by which a rollback skips samples. `documents` lists the numbers
of the documents in the source's store. Samples that a rollback skipped are left out, as in the run: the list has the
samples that the newest attempt reads at this step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from gangline import UserError
from gangline.run import attempts
from gangline_dataloader.sources.of_run import find_first_sample, locate_documents, open_run_source

VERSION = 1


def run(argv: Sequence[str]) -> int:
    """Print the samples of a step. Raises UserError for a step that the run does not have."""
    words = argparse.ArgumentParser(
        prog="gangline data samples",
        description="List the samples of a training step and the documents in each sample.",
    )
    words.add_argument("run_dir", metavar="RUN_DIR")
    words.add_argument(
        "--step",
        type=int,
        required=True,
        metavar="K",
        help="number of the step; the first step is 1, as in metrics.jsonl",
    )
    words.add_argument("--json", action="store_true", help="print one JSON document")
    options = words.parse_args(list(argv))
    config, source = open_run_source(options.run_dir)
    if not 1 <= options.step <= config.steps:
        raise UserError(f"--step {options.step}: the run has steps 1 to {config.steps}.")
    lines = attempts.read(options.run_dir)
    first = find_first_sample(lines, options.step, config.batch)
    size = config.batch.get_size(first)
    samples = locate_documents(source, np.arange(first, first + size))
    attempt = attempts.find_newest(lines)
    if options.json:
        about = {"version": VERSION, "run_dir": options.run_dir, "step": options.step, "attempt": attempt}
        sizes = {"sequence_length": source.sequence_length, "global_size": size, "first_sample": first}
        print(json.dumps({**about, **sizes, "samples": [asdict(one) for one in samples]}))
        return 0
    print(f"step {options.step} of attempt {attempt}: samples {first} to {first + size - 1}")
    print(f"{'sample':>12} {'source':<12} {'epoch':>5} {'row':>12} {'first token':>14} documents")
    for one in samples:
        numbers = one.documents
        documents = "unknown" if not numbers else f"{numbers[0]}" + (f" to {numbers[-1]}" if numbers[1:] else "")
        print(f"{one.sample:>12} {one.source:<12} {one.epoch:>5} {one.row:>12} {one.first_token:>14} {documents}")
    return 0
