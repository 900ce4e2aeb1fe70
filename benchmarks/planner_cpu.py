"""Compare plans from calibrations of this machine with its runs: ten layouts of small models on 1 to 8 processes.

    python benchmarks/planner_cpu.py [--steps 10] [--turns 2] [--layouts 0 3 4] [--json out.json]

Other load on the machine changes from minute to minute. So calibrations and runs of a layout alternate: `gangline plan
calibrate` with the processes of the run, `train`, and so on, with a calibration at the end. The planned step time is
the median of the plans of `gangline plan compare` with each calibration; the measured step time is the median over all
runs.

Prints a table, the median error, and how many pairs of layouts the plans rank like the runs, among the pairs whose
measured medians differ by more than 10 %. Goal: a median error of 15 %, and all pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles

from gangline.record import read_records
from gangline_basics.cluster.file import load_cluster
from gangline_planner.compare import compare
from gangline_testkit.real_runs import copy_environment, write_small_text

WIDE = "model.dim=256 model.layers=4 model.heads=4 model.kv_heads=4 model.ffn_dim=1024"
NARROW = "model.dim=128 model.layers=8 model.heads=4 model.kv_heads=4 model.ffn_dim=512"
LONG = "batch.global_size=8 batch.sequence_length=512"
SHORT = "batch.global_size=16 batch.sequence_length=128"
LAYOUTS = [
    (1, f"parallel=single {WIDE} {LONG} batch.micro_size=2"),
    (1, f"parallel=single {NARROW} {SHORT} batch.micro_size=4"),
    (2, f"parallel=ddp {WIDE} {LONG} batch.micro_size=2"),
    (2, f"parallel=fsdp {WIDE} {LONG} batch.micro_size=1"),
    (2, f"parallel=3d parallel.tp=2 {NARROW} {LONG} batch.micro_size=2"),
    (2, f"parallel=3d parallel.pp=2 parallel.tp=1 {WIDE} {LONG} batch.micro_size=1"),
    (4, f"parallel=3d parallel.tp=2 parallel.pp=2 {WIDE} {LONG} batch.micro_size=1"),
    (4, f"parallel=fsdp {NARROW} {SHORT} batch.micro_size=2"),
    (8, f"parallel=ddp {NARROW} {SHORT} batch.micro_size=2"),
    (8, f"parallel=3d parallel.tp=2 parallel.pp=2 {NARROW} {SHORT} batch.micro_size=2"),
]
COMMON = "run.device=cpu run.sample=0 validate.every=null checkpoint.every=1000 track=[jsonl] precision=fp32"


@dataclass(frozen=True)
class Row:
    """Planned and measured seconds of a step.

    drift   slowest plan over fastest plan, minus 1
    spread  interquartile range of the step times over their median
    load    runnable processes of the machine per core, at the end of the last run
    """

    processes: int
    words: str
    planned: float
    measured: float
    drift: float
    spread: float
    load: float
    worst: str

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def ran(*words: str) -> None:
    """Run a command. Raises RuntimeError with its output if it fails."""
    variables = {**copy_environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def measured(number: int, processes: int, words: str, place: Path, steps: int, turns: int) -> Row:
    """Return the row of one layout, with alternating calibrations and runs."""
    calibrate = (sys.executable, "-m", "gangline", "plan", "calibrate", f"--processes={processes}", "--out")
    run = [*words.split(), *COMMON.split(), f"launch.processes={processes}", f"run.steps={steps}"]
    files = [place / f"{number}-{turn}.yaml" for turn in range(turns + 1)]
    run_dirs = [place / f"run-{number}-{turn}" for turn in range(turns)]
    ran(*calibrate, str(files[0]))
    for file, run_dir in zip(files[1:], run_dirs, strict=True):
        ran(sys.executable, "-m", "gangline.cli.train", *run, f"data.path={place / 'text'}", f"run.dir={run_dir}")
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        ran(*calibrate, str(file))
    found = sorted(
        (compare(str(run_dirs[0]), load_cluster(str(file))) for file in files), key=lambda one: one.step.planned
    )
    seconds = [record["step_seconds"] for run_dir in run_dirs for record in read_records(run_dir / "metrics.jsonl")[2:]]
    low, middle, high = quantiles(seconds, n=4)
    worst = found[len(found) // 2].worst
    return Row(
        processes=processes,
        words=words,
        planned=median(one.step.planned for one in found),
        measured=middle,
        drift=found[-1].step.planned / found[0].step.planned - 1,
        spread=(high - low) / middle,
        load=load,
        worst=f"{worst.name} {worst.apart:+.3g} s" if worst else "",
    )


def ranked(rows: list[Row]) -> tuple[int, int]:
    """Return (number of pairs that the plans rank like the runs, number of pairs that differ by more than 10 %)."""
    pairs = [
        (one, other)
        for one, other in combinations(rows, 2)
        if max(one.measured, other.measured) > 1.1 * min(one.measured, other.measured)
    ]
    right = sum((one.planned < other.planned) == (one.measured < other.measured) for one, other in pairs)
    return right, len(pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps per run")
    parser.add_argument(
        "--turns", type=int, default=2, help="runs per layout, with a calibration before and after each"
    )
    parser.add_argument(
        "--layouts", type=int, nargs="*", default=range(len(LAYOUTS)), help="numbers of the layouts, from 0"
    )
    parser.add_argument("--keep", type=Path, help="folder to keep the runs and cluster files in")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    print(
        f"{'ranks':>5} {'planned':>9} {'measured':>9} {'error':>7} {'drift':>7} {'spread':>7} {'load':>5}  worst term"
    )
    with tempfile.TemporaryDirectory() as name:
        place = asked.keep or Path(name)
        place.mkdir(parents=True, exist_ok=True)
        write_small_text(place / "text")
        for number in asked.layouts:
            processes, words = LAYOUTS[number]
            row = measured(number, processes, words, place, asked.steps, asked.turns)
            rows.append(row)
            print(
                f"{row.processes:5} {row.planned:9.4f} {row.measured:9.4f} {row.error:+7.1%} {row.drift:+7.1%} "
                f"{row.spread:7.1%} {row.load:5.1f}  {row.worst}; {row.words}",
                flush=True,
            )
    right, pairs = ranked(rows)
    print(f"median error {median(abs(row.error) for row in rows):.1%}; {right} of {pairs} pairs ranked correctly")
    if asked.json:
        asked.json.write_text(json.dumps([{**asdict(row), "error": row.error} for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
