"""Compare `gangline data prepare --near-duplicates` with the library rensa alone, in CPU seconds of one process.

    python benchmarks/near_duplicates.py [--documents 3000 --rounds 5]

Documents have 500 words; one in five is nearly equal to another. Both ways search with the threshold 0.8, alternating.
The library is called as in its documentation: sets of five consecutive words, one signature per document, its own
index. Goal: gangline is not slower.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Callable

import numpy as np
from rensa import RMinHash, RMinHashDeduplicator

from gangline_dataloader.prepare.near import PERMUTATIONS, choose_bands, compute_signature, mark_near_unique


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def texts(count: int) -> list[str]:
    """Return documents of words whose frequencies fall with rank, as in English."""
    rng = np.random.default_rng(0)
    found: list[list[str]] = []
    for number in range(count):
        if number % 5 == 4:
            words = list(found[int(rng.integers(number))])
            words[int(rng.integers(500))] = "changed"
        else:
            words = [f"w{word}" for word in rng.zipf(1.3, 500) % 50_000]
        found.append(words)
    return [" ".join(words) for words in found]


def ours(documents: list[str]) -> int:
    signatures = np.stack([compute_signature(text) for text in documents])
    (kept,) = mark_near_unique([signatures], [np.ones(len(documents), bool)], 0.8)
    return int(kept.sum())


def library(documents: list[str]) -> int:
    bands, _ = choose_bands(0.8)
    index, kept = RMinHashDeduplicator(0.8, PERMUTATIONS, True, bands), 0
    for number, text in enumerate(documents):
        words = text.lower().split()
        minhash = RMinHash(PERMUTATIONS, 42)
        minhash.update([" ".join(words[place : place + 5]) for place in range(len(words) - 4)])
        kept += index.add(str(number), minhash)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    documents = texts(asked.documents)
    ways: dict[str, Callable[[list[str]], int]] = {"prepare --near-duplicates": ours, "rensa": library}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    kept: dict[str, int] = {}
    for _ in range(asked.rounds):
        for name, way in ways.items():
            start = cpu()
            kept[name] = way(documents)
            seconds[name].append(cpu() - start)
    for name, taken in seconds.items():
        rate = len(documents) / statistics.median(taken)
        print(f"{name:16} {rate:8.0f} documents/CPU s, {kept[name]} of {len(documents)} kept")
    pairs = zip(seconds["rensa"], seconds["prepare --near-duplicates"], strict=True)
    print(f"speed of gangline: {statistics.median(one / other for one, other in pairs):.2f} x rensa (goal 1)")


if __name__ == "__main__":
    main()
