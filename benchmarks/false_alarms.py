"""Count the verdicts of health=monitors in real runs without faults. Goal: no verdict that triggers an action.

    python benchmarks/false_alarms.py --steps 10000

Ranks of a tiny model run over gloo, in runs of 2,500 steps with different seeds, under any other load on the machine.
The default is four ranks: with fewer than three, `health.monitors.rank_losses` and the majority vote of replicas have
no effect.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from gangline.run.events import read_events
from gangline_testkit.real_runs import RealRuns

EACH = 2500  # number of steps of each run
SECONDS = 3600.0  # time limit of a run; a longer run has failed
ROUTINE = ("monitors", "not-compared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    told: Counter[tuple[str, str]] = Counter()
    acted: Counter[str] = Counter()
    done = 0
    with tempfile.TemporaryDirectory() as folder, RealRuns(Path(folder), seconds=SECONDS) as runs:
        while done < options.steps:
            steps, run_dir = min(EACH, options.steps - done), f"run-{done}"
            words = ["parallel=ddp", f"launch.processes={options.ranks}", f"batch.global_size={options.ranks}"]
            words += ["checkpoint.every=200", "health=monitors", f"run.seed={done}", "launch.max_restarts=9"]
            runs.train(f"run.dir={run_dir}", f"run.steps={steps}", *words)
            done += steps
            for line in read_events(runs.directory / run_dir):
                if line["event"] == "response" and line["action"] not in ("note", "warn"):
                    acted[line["action"]] += 1
                elif line["event"] == "launch" and line["why"] != "start":
                    acted["restart"] += 1
                elif line["event"] == "verdict" and line["kind"] not in ROUTINE:
                    told[line["kind"], line["suggestion"]] += 1
                    print(f"  {line['kind']} at {line['where']}: {line['evidence'][:160]}", flush=True)
            said = f"actions: {dict(acted) or 'none'}; verdicts: {dict(told) or 'none'}"
            print(f"{done} steps of {options.ranks} ranks: {said}", flush=True)


if __name__ == "__main__":
    main()
