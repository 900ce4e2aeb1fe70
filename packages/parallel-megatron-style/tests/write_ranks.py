"""Rank functions for the tests of text generation."""

from __future__ import annotations

from runtimes import runtime_of

from gangline.batch import Batch
from gangline.config.schema import Run
from gangline.runtime import Sampling, Written
from gangline_testkit.inputs import share
from gangline_testkit.strategy_ranks import RankStep, run_step


def texts(run: Run, prompts: list[list[int]], how: Sampling) -> tuple[list[Written], float]:
    """Generate text between two evaluations; return (texts, second loss minus first loss)."""
    runtime = runtime_of(run)
    before = runtime.evaluate(batches(run, runtime.data_coordinate))
    written = runtime.generate(prompts, how)
    return written, runtime.evaluate(batches(run, runtime.data_coordinate))[0] - before[0]


def batches(run: Run, coordinate: tuple[int, int]) -> list[Batch]:
    index, width = coordinate
    sizes = {"size": run.batch.global_size, "micro_size": 1, "length": run.batch.sequence_length}
    return share(0, index, width, **sizes, vocab_size=run.model.vocab_size, kind="whole")


def stepped(run: Run) -> RankStep:
    """Run one step."""
    runtime = runtime_of(run)
    return run_step(runtime, batches(run, runtime.data_coordinate))
