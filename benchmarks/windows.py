"""What a rank gets from a token store, in tokens a CPU second of the whole process: `BatchReader.take`, which reads
ahead in its thread, beside a bare gather and nanoGPT's `get_batch`.

A store of uint16 tokens in the page cache, in the order of `data=tokens`. "stored" is what `take` gives, with where
documents end; "int64" the batch that a model gets of it on a CPU, positions and documents derived. Each round has all
of them, one after another; ratios are medians over the rounds. Goals at 16 x 2048: stored 18 times nanoGPT and half of
the bare gather, int64 12 times; at 32 x 4096: stored 35 times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from data import bare_batch

from gangline.config import default_run
from gangline.data import ReadPlace
from gangline.data.expand import expand
from gangline_dataloader.config import TokensConfig
from gangline_dataloader.sources import build
from gangline_dataloader.store.manifest import Manifest, Shards, Tokenizer, ends_of, file_of
from gangline_dataloader.store.npy import NpyWriter

CPU = torch.device("cpu")


def store(folder: Path, tokens: int) -> Path:
    """A store of random tokens, documents of 738 tokens on average."""
    draws = np.random.default_rng(0)
    lengths = np.maximum(1, draws.lognormal(np.log(403), 1.1, tokens // 300).astype(np.int64))
    ends = np.cumsum(lengths)
    ends = np.append(ends[ends < tokens], tokens).astype(np.uint32)
    sums = []
    for name, dtype, pieces in (
        (file_of(0), "<u2", (draws.integers(0, 50_000, 1 << 22).astype(np.uint16) for _ in range(tokens >> 22))),
        (ends_of(0), "<u4", iter([ends])),
    ):
        writer = NpyWriter(folder / name, dtype)
        for piece in pieces:
            writer.write(piece)
        sums.append(writer.close())
    shards = Shards([tokens], [len(ends)], [sums[0]], [sums[1]])
    Manifest("<u2", 50_000, Tokenizer("tokenizer.json", "random", None, 0), shards).write(folder)
    return folder


def ways(folder: Path, rows: int, length: int) -> Iterator[tuple[str, Callable[[int], object]]]:
    """Name and what gives the batch of a step, of each way to read."""
    config = TokensConfig(path=str(folder), validation_fraction=0.0)
    run = default_run(data=config, batch={"global_size": rows, "sequence_length": length})
    tokens = np.load(folder / file_of(0), mmap_mode="r")
    view = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
    starts = np.random.default_rng(1).integers(0, len(view), (4096, rows))
    yield "nanoGPT", lambda step: bare_batch(tokens, rows, length)
    yield "bare gather", lambda step: view[starts[step % len(starts)]]
    for name, documents in (("stored, no documents", False), ("stored", True)):
        config.documents = documents
        reader = build.tokens(run.data, run, "train").reader(ReadPlace(0, 1, rows, rows, CPU))
        reader.begin(0, 0)
        yield name, lambda step, reader=reader: reader.take()
    other = build.tokens(run.data, run, "train").reader(ReadPlace(0, 1, rows, rows, CPU))
    other.begin(0, 0)
    yield "int64", lambda step: [expand(stored, step, CPU) for stored in other.take()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1 << 28)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        where = store(Path(folder), options.tokens)
        for rows, length in ((16, 2048), (32, 4096)):
            measure(where, rows, length, options.rounds)


def measure(folder: Path, rows: int, length: int, rounds: int) -> None:
    """Print a line for each way."""
    steps = max(32, (1 << 23) // (rows * length))
    found = list(ways(folder, rows, length))
    rates: dict[str, list[float]] = {name: [] for name, _ in found}
    for number in range(rounds + 1):
        for name, take in found:
            begin = time.process_time()
            for step in range(number * steps, (number + 1) * steps):
                take(step)
            if number:
                rates[name].append(steps * rows * length / (time.process_time() - begin))
    for name, each in rates.items():
        ratios = [
            statistics.median(mine / other for mine, other in zip(each, rates[beside], strict=True))
            for beside in ("nanoGPT", "bare gather")
        ]
        print(
            f"{rows:>3} x {length:<5} {name:<21} {statistics.median(each) / 1e6:7.0f} M tokens a CPU second   "
            f"{ratios[0]:6.1f} x nanoGPT   {ratios[1]:5.2f} of a bare gather",
            flush=True,
        )


if __name__ == "__main__":
    main()
