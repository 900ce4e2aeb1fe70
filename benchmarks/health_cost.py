"""Measure the cost of all default monitors of health=monitors per step: two ranks, steps with and without them.

    python benchmarks/health_cost.py --pairs 40

Prints the wall time and CPU seconds that the checks add to a step, as a share of the step, each with a 95 % confidence
interval (bootstrap of the median of the ratios of pairs). On a busy machine wall times are noisy; CPU seconds exclude
waits for other work. "calls" is measured only around the calls of checks, in steps with and without them, so other
noise does not affect it. Also prints the costs that do not occur in every step: a comparison of weights, and the
watchdog process. Goal: 1 %.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gangline.train import loop as training, verdicts
from gangline.train.report import Clock
from gangline_health.config import CorruptionOptions
from gangline_health.monitors.bits import compute_fingerprint, list_gradients, list_weights
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session

Ratios = list[tuple[float, float, float, float]]  # (wall with checks, wall without, CPU with checks, CPU without)
MODEL = (
    "model.dim=256", "model.layers=8", "model.heads=8", "model.kv_heads=4", "model.ffn_dim=704", "precision=fp32",
    "batch.global_size=16", "batch.sequence_length=256", "validate.every=null", "checkpoint=off", "parallel=ddp",
    "health=[monitors]", "data=text",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    limit = (
        600.0 + 60.0 * options.pairs
    )  # a step takes 2 s on an idle machine with two cores, and ten times that on a busy one
    with tempfile.TemporaryDirectory() as folder:
        (measured, asked, compared), _ = get_pool(2).run(steps, Path(folder, "run"), options.pairs, timeout=limit)
    step, used = statistics.median(b for _, b, _, _ in measured), statistics.median(d for *_, d in measured)
    print(f"a step without checks    {step:.2f} s, {used:.2f} CPU s per rank; {len(measured)} pairs")
    shares = {
        "wall time": [a / b - 1 for a, b, _, _ in measured],
        "CPU seconds": [c / d - 1 for *_, c, d in measured],
        "calls, wall time": [(a - b) / step for a, b, _, _ in asked],
        "calls, CPU seconds": [(c - d) / used for *_, c, d in asked],
    }
    for name, found in shares.items():
        low, high = interval(found)
        print(f"{name:<24} {statistics.median(found):+.2%} (95 %: {low:+.2%} to {high:+.2%}; goal +1 %)")
    every = CorruptionOptions().every
    print(
        f"a comparison of weights  {compared * 1e3:.1f} ms every {every} steps: {compared / every / step:.4%} of a step"
    )


def steps(run_dir: Path, pairs: int) -> tuple[Ratios, Ratios, float]:
    """Run pairs of steps with and without checks, on each rank, in alternating order; return the times.

    The result also has the times around the calls of checks, and the seconds of a comparison of weights.
    """
    at = Asked()
    training.call_each, verdicts.before_update = at.timed(training.call_each), at.timed(verdicts.before_update)
    verdicts.after_step, verdicts.judge = at.timed(verdicts.after_step), at.timed(verdicts.judge)
    s = open_session(run_dir, *MODEL, f"run.steps={2 * pairs + 4}")
    kept = dict(s.health)
    verdicts.before_run(s)
    one_step(s)
    one_step(s)
    found: Ratios = []
    where: Ratios = []
    for number in range(pairs):
        seconds, asked = {}, {}
        for checks in (True, False) if number % 2 else (False, True):
            s.health = kept if checks else {}
            s.comms.world.barrier()
            began, used = time.perf_counter(), time.process_time()
            one_step(s)
            seconds[checks] = time.perf_counter() - began, time.process_time() - used
            asked[checks] = at.taken()
        found.append((seconds[True][0], seconds[False][0], seconds[True][1], seconds[False][1]))
        where.append((asked[True][0], asked[False][0], asked[True][1], asked[False][1]))
    began = time.perf_counter()
    for pieces in (list_weights(s.runtime), list_gradients(s.runtime)):
        compute_fingerprint(pieces)
    return found, where, time.perf_counter() - began


class Asked:
    """Stopwatch for the outermost calls of the functions that `timed` wraps: wall and CPU seconds of the process."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.inside = False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self.inside:
                return call(*arguments)
            self.inside, began, used = True, time.perf_counter(), time.process_time()
            try:
                return call(*arguments)
            finally:
                self.wall += time.perf_counter() - began
                self.cpu += time.process_time() - used
                self.inside = False

        return timed

    def taken(self) -> tuple[float, float]:
        """Return the seconds since the previous call of `taken`."""
        found = self.wall, self.cpu
        self.wall = self.cpu = 0.0
        return found


def one_step(s) -> None:
    """Run a step of the training loop, up to its decision."""
    clock = Clock()
    clock.pulse.step(s.step + 1)
    training.call_each(s, "before_step", s.step + 1)
    record, own_loss, before = training.step(s, clock)
    mine = verdicts.after_step(s, record)
    seconds, phases = record.step_seconds, clock.pulse.take_rows()
    agreed = training.agree(s.comms.world, seconds, training.stop_requested(), mine, False, phases, own_loss)
    record.rank_seconds, record.rank_phases = agreed.rank_seconds, agreed.rank_phases
    record.rank_losses = agreed.rank_losses
    verdicts.judge(s, [*before, *agreed.verdicts], agreed.now, record)


def interval(values: list[float], times: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the median, by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(times))
    return medians[int(0.025 * times)], medians[int(0.975 * times)]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
