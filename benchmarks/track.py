"""Measure the cost of wandb offline, MLflow and Trackio per step: alternating blocks of steps with each and with none.

    python benchmarks/track.py --rounds 6

The cost in the training loop is the time in `record`. The cost of threads is the CPU seconds of the tracker's threads,
which share the interpreter with the loop: all threads of the process except the loop's, minus their use without a
tracker. The cost of processes is wandb's own process, on another core, which runs during all blocks. Each is printed as
a share of a step's CPU seconds. Goal: 0.5 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

MODEL = (
    "model.dim=256", "model.layers=8", "model.heads=8", "model.kv_heads=4", "model.ffn_dim=704", "precision=fp32",
    "batch.global_size=16", "batch.sequence_length=256", "validate.every=null", "checkpoint=off", "parallel=single",
    "data=text",
)  # fmt: skip
TRACKERS = ("wandb", "mlflow", "trackio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps per block")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HOME": folder, "TRACKIO_DIR": f"{folder}/trackio"}
        measure(Path(folder, "run"), options.rounds, options.steps)


def measure(run_dir: Path, rounds: int, steps: int) -> None:
    from gangline.plugin import registry
    from gangline.track import Start
    from gangline.train import loop as training
    from gangline.train.report import Clock
    from gangline_testkit.runs import build_small_run
    from gangline_testkit.sessions import open_session

    total = (len(TRACKERS) + 1) * rounds * steps + 5
    s = open_session(run_dir, *MODEL, f"run.steps={total}")
    run = build_small_run(*MODEL, f"track=[{','.join(TRACKERS)}]", "track.wandb.mode=offline")
    trackers = {name: registry.build(run.track[name], run) for name in TRACKERS}
    for name, tracker in trackers.items():
        tracker.begin(Start(name, str(run_dir), 0, total, 1, 1, 1, config={"model": {"dim": 256}}))
        settle(tracker)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ("none", *TRACKERS)}
    used: list[float] = []
    for _ in range(rounds):
        for name in found:
            others, beside, told = other_threads(), children(), 0.0
            for _ in range(steps):
                began = time.thread_time()
                record, *_ = training.step(s, Clock())
                used.append(time.thread_time() - began)
                record.time = time.time()
                if name != "none":
                    began = time.perf_counter()
                    trackers[name].record(record)
                    told += time.perf_counter() - began
            if name != "none":
                settle(trackers[name])
            found[name].append(((other_threads() - others) / steps, (children() - beside) / steps, told / steps))
    step = statistics.median(used)
    idle = statistics.median(others for others, _, _ in found.pop("none"))
    print(f"a step: {step:.3f} CPU s of the loop's thread; {rounds} blocks of {steps} steps per tracker")
    for name, rows in found.items():
        thread, beside, told = (statistics.median(column) for column in zip(*rows, strict=True))
        thread = max(0.0, thread - idle)
        print(
            f"{name:<8} in record {told * 1e6:5.0f} us {told / step:8.3%}   "
            f"threads {thread * 1e3:6.2f} ms {thread / step:8.3%}   "
            f"other processes {beside * 1e3:6.2f} ms {beside / step:8.3%}"
        )
    for tracker in trackers.values():
        tracker.end({"why": "done"})


def settle(tracker) -> None:
    """Wait until the tracker has sent all its records."""
    from gangline_track.background import PAUSE

    while not tracker.waiting.empty():
        time.sleep(0.05)
    time.sleep(PAUSE + 1.0)


def other_threads() -> float:
    """Return the CPU seconds of this process without the calling thread."""
    return time.process_time() - time.thread_time()


def children() -> float:
    """Return the CPU seconds of all child processes and their descendants."""
    ticks, parents = os.sysconf("SC_CLK_TCK"), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks
    below, total = {os.getpid()}, 0.0
    while more := {pid for pid, (parent, _) in parents.items() if parent in below and pid not in below}:
        below |= more
        total += sum(parents[pid][1] for pid in more)
    return total


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
