"""Measure the cost of document masking: steps with documents interleaved with steps of the same tokens without.

Document lengths are log-normal as in web text (median 403 tokens, mean 738); positions restart in each document. CPU
seconds of forward and backward, one thread. Goal: at most 1.1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from gangline.batch import Batch
from gangline.config.defaults import build_default_run
from gangline.data.expand import expand
from gangline.data.reader import StoredBatch
from gangline.model.compose import compose_model
from gangline.model.init import make_whole_model

CPU = torch.device("cpu")


def packed(rows: int, length: int, vocab_size: int, shorter: float) -> Batch:
    """Return a batch of rows split from concatenated documents, which are `shorter` times shorter than web text."""
    draws = np.random.default_rng(0)
    lengths = np.maximum(1, draws.lognormal(np.log(403 / shorter), 1.1, rows * length).astype(np.int64))
    ends = np.cumsum(lengths)
    tokens = torch.from_numpy(draws.integers(0, vocab_size, (rows, length + 1)).astype(np.uint16))
    inside = torch.from_numpy(ends[ends < rows * length].astype(np.int32))
    return expand(StoredBatch(tokens, torch.arange(rows), inside), 0, CPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rows, length, shorter in ((16, 128, 1.0), (8, 512, 1.0), (4, 2048, 1.0), (16, 128, 10.0), (4, 2048, 10.0)):
        run = build_default_run(batch={"global_size": rows, "sequence_length": length})
        model = make_whole_model(*compose_model(run), seed=run.seed)
        apart = packed(rows, length, run.model.vocab_size, shorter)
        plain = replace(apart, document=None, ends=None)
        assert apart.ends is not None
        times: dict[str, list[float]] = {"apart": [], "plain": []}
        for turn in range(options.turns + 1):
            for name, batch in (("apart", apart), ("plain", plain)):
                start = time.process_time()
                model(batch).backward()
                if turn:  # the first turn is a warm-up
                    times[name].append(time.process_time() - start)
        ratio = statistics.median(a / p for a, p in zip(times["apart"], times["plain"], strict=True))
        print(
            f"{rows:>3} x {length:<5} {len(apart.ends) / rows:5.1f} documents per row   "
            f"masked {1e3 * statistics.median(times['apart']):7.1f} ms   "
            f"plain {1e3 * statistics.median(times['plain']):7.1f} ms   ratio {ratio:.3f} (goal 1.1)",
            flush=True,
        )


if __name__ == "__main__":
    main()
