"""What all default checks of health=on cost a step: two ranks, steps with and without them in turn, in one run.

    python benchmarks/health_cost.py --pairs 40

Wall time and CPU seconds of a step, as the share that the checks add, each with a 95 % interval (of the median of the
pairs' ratios, by bootstrap): on a busy machine the wall time says little, CPU seconds leave out the wait for other
work. Beside them what comes every so many steps: a comparison of weights, and the process that watches. Goal: 1 %.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from gangline.testing.pool import pool
from gangline.testing.sessions import session
from gangline.train import loop as training, verdicts
from gangline.train.report import Clock
from gangline_health.config import CorruptionOptions
from gangline_health.monitors.bits import fingerprint, gradients, weights

Ratios = list[tuple[float, float, float, float]]  # wall with and without, CPU with and without
MODEL = (
    "model.dim=256", "model.layers=8", "model.heads=8", "model.kv_heads=4", "model.hidden=704", "precision=fp32",
    "batch.global_size=16", "batch.sequence_length=256", "validate.every=null", "checkpoint=off", "parallel=ddp",
    "health=[on]", "data=text",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (measured, compared), _ = pool(2).run(steps, Path(folder, "run"), options.pairs, timeout=limit(options.pairs))
    wall, cpu = [a / b for a, b, _, _ in measured], [c / d for *_, c, d in measured]
    step, used = statistics.median(b for _, b, _, _ in measured), statistics.median(d for *_, d in measured)
    print(f"a step without checks    {step:.2f} s, {used:.2f} CPU s a rank; {len(measured)} pairs")
    for name, ratios in (("wall time", wall), ("CPU seconds", cpu)):
        low, high = interval(ratios)
        middle = statistics.median(ratios)
        print(f"{name:<24} {middle - 1:+.2%} (95 %: {low - 1:+.2%} to {high - 1:+.2%}; goal +1 %)")
    every = CorruptionOptions().every
    print(f"a comparison of weights  {compared * 1e3:.1f} ms, of a step each {every}: {compared / every / step:.4%}")


def limit(pairs: int) -> float:
    """Seconds: a step takes 2 s on a quiet machine of two cores, and ten times as long on a busy one."""
    return 600.0 + 60.0 * pairs


def steps(run_dir: Path, pairs: int) -> tuple[Ratios, float]:
    """On each rank: pairs of steps, with the checks and without, in an order that changes."""
    s = session(run_dir, *MODEL, f"run.steps={2 * pairs + 4}")
    kept = dict(s.health)
    verdicts.before_run(s)
    one_step(s)
    one_step(s)
    found: Ratios = []
    for number in range(pairs):
        seconds = {}
        for checks in (True, False) if number % 2 else (False, True):
            s.health = kept if checks else {}
            s.comms.world.barrier()
            began, used = time.perf_counter(), time.process_time()
            one_step(s)
            seconds[checks] = time.perf_counter() - began, time.process_time() - used
        found.append((seconds[True][0], seconds[False][0], seconds[True][1], seconds[False][1]))
    began = time.perf_counter()
    for pieces in (weights(s.runtime), gradients(s.runtime)):
        fingerprint(pieces)
    return found, time.perf_counter() - began


def one_step(s) -> None:
    """A step of the training loop, up to its order."""
    clock = Clock()
    clock.pulse.step(s.step + 1)
    training.each(s, "before_step", s.step + 1)
    record, own_loss, before = training.step(s, clock)
    mine = verdicts.after_step(s, record)
    seconds, phases = record.step_seconds, clock.pulse.rows()
    agreed = training.agree(s.comms.world, s.device, seconds, training.stop_requested(), mine, False, phases, own_loss)
    record.rank_seconds, record.rank_phases = agreed.rank_seconds, agreed.rank_phases
    record.rank_losses = agreed.rank_losses
    verdicts.judged(s, [*before, *agreed.verdicts], agreed.now, record)


def interval(values: list[float], times: int = 2000) -> tuple[float, float]:
    """Of the median, by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(times))
    return medians[int(0.025 * times)], medians[int(0.975 * times)]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
