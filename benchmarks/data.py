"""Measure the cost of data loading: reading and indexing the built-in corpus, and batches as a share of step time.

Each reader alternates with a bare `get_batch` (random windows of the same tokens, stacked, as in nanoGPT). The step of
the default model is timed on the same batches. CPU seconds, one thread. Goal: under 1 % of the step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bare_loop import BareLoop

from gangline.config.defaults import build_default_run
from gangline.config.schema import Run
from gangline.data.reader import ReadPlace
from gangline.plugin.registry import build
from gangline.train.batches import Batches
from gangline_basics.data.text import TextSource


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def vocabulary(size: int = 1024) -> str:
    """Return a tokenizer.json, trained on a part of Python's standard library."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from gangline_basics.data.corpus import list_corpus

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([file.path for file in list_corpus(None)[:60]], trainer)
    path = Path(tempfile.mkdtemp()) / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def bare_batch(tokens: np.ndarray, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(tokens) - length, (rows,)).tolist()
    x = torch.stack([torch.from_numpy(tokens[i : i + length].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + length].astype(np.int64)) for i in starts])
    return x, y


def measure(name: str, run: Run, source: TextSource, turns: int) -> None:
    """Print one row: milliseconds for the batches of a step, the same for the bare way, and their share of a step."""
    rows, length = run.batch.global_size, run.batch.sequence_length
    batches = Batches(source, ReadPlace(0, 1, rows, rows, torch.device("cpu")))
    loop = BareLoop(run, source, build(run.schedule, run))
    loop.train(1)

    def taken(numbers: range) -> None:
        for n in numbers:
            batches.take(rows * n, n)

    ours, bare, steps = [], [], []
    for turn in range(turns):
        ours.append(cpu_seconds(partial(taken, range(turn * 20, (turn + 1) * 20))) / 20)
        bare.append(cpu_seconds(lambda: [bare_batch(source.tokens, rows, length) for _ in range(20)]) / 20)
        steps.append(cpu_seconds(lambda: loop.train(1)))
    mine, theirs, step = map(statistics.median, (ours, bare, steps))
    print(
        f"{name:<26} {rows:>3} x {length:<5} {1e3 * mine:6.3f} ms  bare {1e3 * theirs:6.3f} ms  "
        f"step {1e3 * step:7.1f} ms  share {mine / step:.2%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = build_default_run()
    reading = [cpu_seconds(lambda: build(run.data, run, "train")) for _ in range(3)]
    source = build(run.data, run, "train")
    print(f"read and index             {statistics.median(reading):.3f} s ({source.describe()})")
    print(f"first sample of an epoch   {1e3 * cpu_seconds(lambda: source.sample(0)):.1f} ms with the random order")
    tokenizer = vocabulary()
    kinds: list[tuple[str, int, int, dict[str, Any]]] = [
        ("bytes", 16, 128, {}),
        ("bytes, longer", 8, 1024, {}),
        ("bytes, document masking", 16, 128, {"document_masking": True}),
        ("tokenizer.json", 16, 128, {"tokenizer": tokenizer}),
    ]
    for name, rows, length, settings in kinds:
        run = build_default_run(batch={"global_size": rows, "sequence_length": length})
        run.model.vocab_size = 1024 if "tokenizer" in settings else 256
        for field, value in settings.items():
            setattr(run.data, field, value)
        measure(name, run, build(run.data, run, "train"), options.turns)


if __name__ == "__main__":
    main()
