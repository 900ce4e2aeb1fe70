"""Stop one of four ranks (SIGSTOP) at random times, and measure the delay of the verdict and whether it names the rank.

    python benchmarks/hangs.py --times 20

Prints a line for each stop, then the number of verdicts with the correct rank, median and maximum delay, and false
alarms.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

from gangline.run.events import read_events
from gangline_health.pulses import PulseReader, Seen, find
from gangline_testkit.real_runs import RealRuns

RANKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    seconds, right = [], 0
    with tempfile.TemporaryDirectory() as directory, RealRuns(Path(directory)) as runs:
        words = ("parallel=ddp", f"launch.processes={RANKS}", "launch.max_restarts=1000", "health=monitors")
        runs.start("run.dir=out", *words, "run.steps=1000000", "checkpoint.every=20", "run.save_on_signal=false")
        out = runs.directory / "out"
        for number in range(options.times):
            told = len(found(out))
            ranks = steady(out)
            time.sleep(draw.uniform(0.0, 2.0))
            rank = draw.randrange(RANKS)
            began = time.monotonic()
            os.kill(ranks[rank].pid, signal.SIGSTOP)
            while len(found(out)) == told:
                assert time.monotonic() - began < 300, "no verdict within 300 s"
                time.sleep(0.01)
            verdict = found(out)[told]
            seconds.append(verdict["monotonic"] - began)
            hit = verdict["details"]["ranks"] == [rank]
            right += hit
            print(
                f"{number + 1:3} rank {rank} {seconds[-1]:6.2f} s {'' if hit else 'WRONG '}{verdict['evidence']}",
                flush=True,
            )
        more = len(found(out)) - options.times
    print(f"correct rank         {right} of {options.times}")
    print(f"delay in seconds     median {statistics.median(seconds):.2f}, maximum {max(seconds):.2f}")
    print(f"false alarms         {more}")


def found(out: Path) -> list[dict]:
    """Return the verdicts about hangs."""
    return [line for line in read_events(out) if line["event"] == "verdict" and line["kind"] == "hang"]


def steady(out: Path) -> list[Seen]:
    """Return every rank's heartbeat, after all ranks have run twenty steps since their start."""
    first: dict[int, int] = {}
    while True:
        ranks = [PulseReader(path).read() for path in find(out)] if out.exists() else []
        alive = len(ranks) == RANKS and all(seen.alive and seen.step for seen in ranks)
        if alive and all(seen.step >= first.setdefault(seen.pid, seen.step) + 20 for seen in ranks):
            return ranks
        time.sleep(0.05)


if __name__ == "__main__":
    main()
