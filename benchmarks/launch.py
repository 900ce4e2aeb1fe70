"""Measure runs on a real Slurm: from the allocation to the first step, and from a node crash to the next step.

    python benchmarks/launch.py [--rounds 3] [--only NAME]        as root, with Slurm's packages (see `nox -s slurm`)

Five slurmd run on this machine. Each round runs every way once, so that load on the machine affects all ways equally.
Prints medians and ratios.

first step   from the first line of the batch script to the record of the first step, on four nodes with one rank
             each. Goal: 1.3 x `srun -N4 python -c 'import torch'`, plus the build: the time from the start of the same
             four ranks under launch=local to their first record
node crash   SIGKILL of slurmd, its steps, its agent and its rank, until the record of the next step, with a spare node.
             Baseline: a bare batch script that counts in a file and continues after Slurm has requeued it (goal:
             1.2 x), with the same SlurmdTimeout=10 and cred_expire=5. Slurm's defaults take 185 s (measured once)
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "packages" / "launch" / "tests_on_slurm"))

from own_cluster import OwnCluster  # noqa: E402

from gangline.run.events import read_events  # noqa: E402
from gangline_testkit import RealRuns  # noqa: E402

SECONDS = 600.0
FOUR = ("parallel=ddp", "launch.processes=4", "checkpoint=off", "run.steps=3")
TWO = ("parallel=ddp", "launch.processes=2", "checkpoint.every=5", "run.steps=1000000")
COUNTER = """\
import os, sys, time
import torch
path = sys.argv[1]
while True:
    time.sleep(0.1)
    if os.environ["SLURM_PROCID"] == "0":
        done = int(open(path).read()) if os.path.exists(path) else 0
        with open(path + ".new", "w") as file:
            file.write(str(done + 1))
        os.replace(path + ".new", path)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="text in the names of the ways to measure; default: all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        slurm = OwnCluster(Path(folder), nodes=5)
        try:
            slurm.start()
            measure(slurm, Path(folder), options.rounds, options.only)
        finally:
            slurm.stop()


def measure(slurm: Any, folder: Path, rounds: int, only: str) -> None:
    """Run all ways, round by round, and print their times."""
    ways: dict[str, Callable[[Path], float]] = {
        "first step: srun import torch": lambda place: torch_on_four(slurm),
        "first step: build": build,
        "first step: gangline": lambda place: first_step(slurm, place),
        "node crash: bare requeue": lambda place: bare_crash(slurm, place),
        "node crash: gangline, spare": lambda place: crash(slurm, place),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways if only in name}
    for number in range(rounds):
        for index, name in enumerate(seconds):
            place = folder / f"{number}-{index}"
            place.mkdir()
            seconds[name].append(ways[name](place))
            slurm.fix()
            print(f"{name:<32} {seconds[name][-1]:7.2f}", flush=True)
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    print(f"\n{'seconds':<32} {'median':>7} {'minimum':>7} {'maximum':>7}")
    for name, found in seconds.items():
        print(f"{name:<32} {middle[name]:7.2f} {min(found):7.2f} {max(found):7.2f}")
    if not only or "first" in only:
        bare, built = middle["first step: srun import torch"], middle["first step: build"]
        print(
            f"first step: {middle['first step: gangline'] / (1.3 * bare + built):.2f} x (1.3 x srun + build); goal 1.00"
        )
    if not only or "crash" in only:
        ratio = middle["node crash: gangline, spare"] / middle["node crash: bare requeue"]
        print(f"node crash: {ratio:.2f} x the bare requeue; goal 1.20")


def torch_on_four(slurm: Any) -> float:
    begun = time.monotonic()
    slurm.ask("srun", "-N4", "--ntasks-per-node=1", "--exclusive", sys.executable, "-c", "import torch")
    return time.monotonic() - begun


def build(place: Path) -> float:
    with RealRuns(place, warm=False) as runs:
        process = runs.start("run.dir=out", *FOUR)
        end = first_record(runs, process)
        launch = next(line for line in read_events(place / "out") if line["event"] == "launch")
        return end - datetime.fromisoformat(launch["time"]).timestamp()


def first_step(slurm: Any, place: Path) -> float:
    with RealRuns(place, warm=False, seconds=SECONDS) as runs:
        runs.environment.update(slurm.environment)
        end = first_record(runs, runs.start("run.dir=out", *FOUR, "launch=slurm", "launch.nodes=4"))
        return end - (place / "out" / "launch" / "nodes").stat().st_mtime  # the script writes this file first


def first_record(runs: RealRuns, process: subprocess.Popen[str]) -> float:
    """Return the time of the first step's record, in seconds since the epoch. Returns after the end of the run."""
    runs.wait_for_step(process, "out", 1, SECONDS)
    end = time.time()
    runs.finish(process)
    return end


def crash(slurm: Any, place: Path) -> float:
    with RealRuns(place, warm=False, seconds=SECONDS) as runs:
        runs.environment.update(slurm.environment)
        process = runs.start("run.dir=out", *TWO, "launch=slurm", "launch.nodes=2", "launch.spares=1")
        runs.wait_for_step(process, "out", 20, SECONDS)
        lost = next(line for line in read_events(place / "out") if line["event"] == "launch")["nodes"][1]
        slurm.kill_node(lost)
        begun, launches = time.monotonic(), 1
        done = 0
        while launches == 1 or runs.read_records("out")[-1]["step"] <= done:
            starts = [line for line in read_events(place / "out") if line["event"] == "launch"]
            if launches == 1 and len(starts) > 1:
                launches, done = len(starts), runs.read_records("out")[-1]["step"]
            assert time.monotonic() - begun < SECONDS, "no step after the crash"
            time.sleep(0.02)
        return time.monotonic() - begun


def bare_crash(slurm: Any, place: Path) -> float:
    (place / "counter.py").write_text(COUNTER)
    path = place / "count"
    script = place / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun --kill-on-bad-exit=1 {sys.executable} {place}/counter.py {path}\n")
    out = f"--output={place}/slurm.out"
    slurm.ask("sbatch", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--requeue", out, str(script))
    wait(lambda: count(path) >= 20)
    slurm.kill_node("n2")
    begun = time.monotonic()
    before = -1
    while before < 0 or count(path) <= before:  # wait until no process of the first start can count any more
        if before < 0 and not slurm.processes("n1"):
            before = count(path)
        assert time.monotonic() - begun < SECONDS, "no step after the crash"
        time.sleep(0.02)
    return time.monotonic() - begun


def count(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def wait(until: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not until():
        assert time.monotonic() - begun < SECONDS
        time.sleep(0.05)


if __name__ == "__main__":
    main()
