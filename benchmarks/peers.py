"""Compare two ways to give tensor, context and pipeline ranks the same batch: all read it, or one reads for all.

The ranks of one machine use gloo, and have the batches of one data rank (sequences of 2048 uint16 tokens in memory,
read by core's reader). The shared way needs two broadcasts. Between two batches a rank sleeps, in place of a step's
compute. Prints the milliseconds that a step waits for its data: the median over the steps, of the slowest rank. The
ways alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from gangline.data.base import DataSource
from gangline.data.reader import ReadPlace
from gangline.data.sample import Sample
from gangline.mesh import Mesh
from gangline.train.batches import Batches
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

CPU = torch.device("cpu")


class Windows(DataSource):
    """A data source of token windows in memory."""

    def __init__(self) -> None:
        self.tokens = np.arange(1 << 22, dtype=np.uint16)

    def sample(self, i: int) -> Sample:
        start = i * 7919 % (len(self.tokens) - 2049)
        return {"tokens": self.tokens[start : start + 2049]}

    def count_samples(self) -> None:
        return None

    def compute_fingerprint(self) -> str:
        return "windows"


def waits(shared: bool, rows: int, steps: int, seconds: float) -> list[float]:
    """Return the seconds that each step of this rank waits for its data."""
    world = rank.make_comms(Mesh.of({"tp": rank.world})).world
    batches = Batches(Windows(), ReadPlace(0, 1, rows, rows, CPU), world if shared else None)
    found = []
    for step in range(steps):
        before = time.perf_counter()
        batches.take(step * rows, step)
        found.append(time.perf_counter() - before)
        time.sleep(seconds)
    batches.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    for rows in (1, 16, 64):
        found: dict[str, list[float]] = {"each reads": [], "broadcast": []}
        for _ in range(options.rounds):
            for name, shared in (("each reads", False), ("broadcast", True)):
                ranks = get_pool(options.ranks).run(waits, shared, rows, options.steps, 0.02)
                found[name] += [max(step) for step in list(zip(*ranks, strict=True))[5:]]
        shown = "   ".join(f"{name} {1e3 * statistics.median(each):7.2f} ms" for name, each in found.items())
        print(f"{options.ranks} ranks, {rows:>3} x 2048   {shown}", flush=True)


if __name__ == "__main__":
    main()
