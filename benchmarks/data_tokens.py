"""Measure tokens per CPU second of a rank's reader, compared with nanoGPT's get_batch and a bare gather of equal rows.

The tokens are one token store of uint16 in the page cache. The ways alternate, round by round, and a ratio is the
median of the ratios of the rounds. CPU seconds are of the complete process with its threads, so that other load on the
machine has little effect. All ways except `dense` measure `take`, which returns tokens as stored: `tokens` without the
ends of documents, `documents` with them, `packed` with rows of complete documents, `fill in` with half of the documents
rearranged for fill-in-the-middle. `dense` measures the int64 batch of `tokens` that a model gets on a CPU
(`gangline.data.expand`).

Goals at 16 x 2048: `documents` 18 times nanoGPT and half of the bare gather, `dense` 12 times nanoGPT; at 32 x 4096: 35
times.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gangline.config.defaults import build_default_run
from gangline.config.schema import Run
from gangline.data.expand import expand
from gangline.data.reader import BatchReader, ReadPlace
from gangline_dataloader.config import TokensConfig
from gangline_dataloader.dali.config import DaliConfig
from gangline_dataloader.order.mixture import Ingredient, MixtureOrder, WeightStage
from gangline_dataloader.order.single import SingleOrder
from gangline_dataloader.packing.pack_plan import make
from gangline_dataloader.sources import build
from gangline_dataloader.sources.infill import Infill
from gangline_dataloader.store.manifest import Manifest, Shards, Tokenizer
from gangline_dataloader.store.npy import HEADER
from gangline_dataloader.store.write import ShardWriter

SIZES = ((2048, 16), (4096, 32))  # (T, B)


def corpus(folder: Path, count: int) -> None:
    """Write a store of `count` tokens in documents of log-normal lengths (median 403, mean 738), in shards of 2^26."""
    rng, shards, left = np.random.default_rng(0), Shards(), count
    while left:
        size = min(left, 1 << 26)
        cuts = np.cumsum(np.maximum(1, rng.lognormal(np.log(403), 1.1, size // 500).astype(np.int64)))
        writer = ShardWriter(folder, len(shards), "<u2")
        writer.write(np.split(rng.integers(0, 50_000, size, dtype=np.uint16), cuts[cuts < size]))
        shards.append(writer.close())
        left -= size
    manifest = Manifest("<u2", 50_000, Tokenizer("bytes", "bytes", None, 0), shards)
    manifest.write(folder)
    for T, _ in SIZES:
        make(folder, manifest, T)


def get_batch(file: Path, T: int, B: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch as nanoGPT's train.py does: map the file again for each batch, and slice by tensors."""
    data = np.memmap(file, np.uint16, "r", HEADER)
    ix = torch.randint(len(data) - T, (B,))
    x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in ix])
    return x, y


def ways(folder: Path, T: int, B: int) -> dict[str, Callable[[], object]]:
    """Return name -> function that makes the batch of one step."""
    file = folder / "shard-00000.npy"
    data = np.load(file, mmap_mode="r")
    view = np.lib.stride_tricks.sliding_window_view(data, T + 1)
    starts = itertools.cycle(np.random.default_rng(1).integers(0, len(data) // T - 1, (4096, B)) * T)
    found: dict[str, Callable[[], object]] = {
        "gather": lambda: view[next(starts)],
        "nanoGPT": lambda: get_batch(file, T, B),
    }
    place = ReadPlace(0, 1, B, B, torch.device("cpu"))
    for name, config in configs(folder).items():
        run = run_of(config, T, B)
        source = build.build_tokens(config, run, "train")
        if name == "fill in":
            source.infill = Infill(0.5, 0.5, (1, 2, 3), 0, run.seed)
        found[name] = begun(source.open_reader(place)).take
    found["dense"] = partial(dense, begun(build.build_tokens(config, run, "train").open_reader(place)))
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        from gangline_dataloader.dali.source import build_dali

        given = DaliConfig(path=str(folder))
        found["dali"] = begun(build_dali(given, run_of(given, T, B), "train").open_reader(place)).take
    return found


def begun(reader: BatchReader) -> BatchReader:
    reader.begin(0, 0)
    return reader


def dense(reader: BatchReader) -> object:
    return [expand(one, 0, torch.device("cpu")) for one in reader.take()]


def configs(folder: Path) -> dict[str, TokensConfig]:
    path = str(folder)
    return {
        "packed": TokensConfig(path=path, packing="best_fit", document_masking=True),
        "fill in": TokensConfig(path=path, document_masking=True),
        "documents": TokensConfig(path=path, document_masking=True),
        "tokens": TokensConfig(path=path),
    }


def run_of(config: TokensConfig, T: int, B: int) -> Run:
    run = build_default_run(batch={"global_size": B, "sequence_length": T})
    run.model.vocab_size, run.data = 50_000, config
    return run


def measure(folder: Path, T: int, B: int, rounds: int, steps: int) -> None:
    """Print a row for each way: million tokens per CPU second, and the ratio to nanoGPT."""
    found = ways(folder, T, B)
    spent: dict[str, list[float]] = {name: [] for name in found}
    waited: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, take in found.items():
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(steps):
                take()
            if number:  # the first round warms up
                spent[name].append((time.process_time() - cpu) / steps)
                waited[name].append((time.perf_counter() - wall) / steps)
    print(f"T {T}, B {B}, {rounds} rounds of {steps} steps")
    for name, seconds in spent.items():
        ratio = statistics.median(theirs / mine for theirs, mine in zip(spent["nanoGPT"], seconds, strict=True))
        bare = statistics.median(theirs / mine for theirs, mine in zip(spent["gather"], seconds, strict=True))
        middle, wall = statistics.median(seconds), statistics.median(waited[name])
        print(
            f"  {name:<9} {B * T / middle / 1e6:8.1f} M tokens/CPU s  {1e6 * middle:8.1f} us CPU  "
            f"{1e6 * wall:8.1f} us wall  {ratio:6.2f} x nanoGPT  {bare:5.2f} x a bare gather",
            flush=True,
        )


def first_batches(folder: Path, T: int, B: int) -> None:
    """Print the milliseconds to the first batch, from the start, from 80 % of an epoch, and from epoch 1000."""
    config = TokensConfig(path=str(folder))
    place = ReadPlace(0, 1, B, B, torch.device("cpu"))
    for share in (0.0, 0.8, 1000.0):
        took = []
        for _ in range(5):
            begun = time.perf_counter()
            source = build.build_tokens(config, run_of(config, T, B), "train")
            reader = source.open_reader(place)
            reader.begin(int(share * (source.count_samples() or 0)), 0)
            reader.take()
            took.append(time.perf_counter() - begun)
            reader.close()
        print(f"  first batch at {share:g} epochs: {1e3 * statistics.median(took):.1f} ms")


def resumes() -> None:
    """Print CPU milliseconds and MiB to compute the next 1024 sample indices after a resume, for large corpora."""
    for rows in (10**6, 10**8, 10**11):
        orders: dict[str, Callable[[], Callable[[np.ndarray], object]]] = {
            "one source": partial(SingleOrder, Ingredient("a", rows), 7),
            "a mixture": partial(
                MixtureOrder, [Ingredient("a", rows), Ingredient("b", rows // 3)], [WeightStage(0, (0.7, 0.3))], 7
            ),
        }
        for name, order in orders.items():
            took, most = [], 0
            for share in (0.0, 0.3, 0.8, 7.7):
                first = int(share * rows)
                for _ in range(5):
                    cpu = time.process_time()
                    order()(np.arange(first, first + 1024))
                    took.append(time.process_time() - cpu)
                tracemalloc.start()
                order()(np.arange(first, first + 1024))
                most = max(most, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            print(
                f"  resume in {rows:.0e} rows of {name}: {1e3 * statistics.median(took):.1f} ms, {most / 2**20:.1f} MiB"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000, help="steps per round, many times the prefetch depth")
    parser.add_argument("--tokens", type=int, default=1 << 27, help="size of the store in tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        corpus(Path(folder), options.tokens)
        for T, B in SIZES:
            measure(Path(folder), T, B, options.rounds, options.steps)
        first_batches(Path(folder), *SIZES[0])
    resumes()


if __name__ == "__main__":
    main()
