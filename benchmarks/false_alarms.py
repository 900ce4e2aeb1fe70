"""Steps of real runs in which nothing is wrong: what health=on says of them. Nothing that acts is the goal.

    python benchmarks/false_alarms.py --steps 10000

Two ranks of a tiny model over gloo, in runs of 2,500 steps, each with another seed, on whatever else the machine does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from gangline.testing.real_runs import RealRuns
from gangline.tools import read_events

EACH = 2500
ROUTINE = ("watch", "not-compared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    told: Counter[tuple[str, str]] = Counter()
    acted: Counter[str] = Counter()
    done = 0
    with tempfile.TemporaryDirectory() as folder, RealRuns(Path(folder), seconds=590.0) as runs:
        while done < options.steps:
            steps, run_dir = min(EACH, options.steps - done), f"run-{done}"
            words = ("parallel=ddp", "launch.processes=2", "checkpoint.every=200", "health=on", f"run.seed={done}")
            runs.train(f"run.dir={run_dir}", f"run.steps={steps}", *words, "launch.max_restarts=9")
            done += steps
            for line in read_events(runs.directory / run_dir):
                if line["event"] == "order":
                    acted[line["action"]] += 1
                elif line["event"] == "launch" and line["why"] != "start":
                    acted["restart"] += 1
                elif line["event"] == "verdict" and line["kind"] not in ROUTINE:
                    told[line["kind"], line["suggestion"]] += 1
                    print(f"  {line['kind']} at {line['where']}: {line['evidence'][:160]}", flush=True)
            print(f"{done} steps: acted {dict(acted) or 'never'}; told {dict(told) or 'nothing'}", flush=True)


if __name__ == "__main__":
    main()
