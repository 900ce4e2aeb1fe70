"""Rank functions for the tests of `precision=fp8`: a short training on sequences that can be learned."""

from __future__ import annotations

import torch
from runtimes import runtime_of

from gangline.batch import Batch
from gangline.plugin import registry
from gangline_testkit.runs import build_small_run

ROWS, LENGTH, VOCABULARY = 8, 12, 61


def batches(step: int, rows: int) -> list[Batch]:
    """Return the `ROWS` sequences of a step in microbatches of `rows` sequences.

    All sequences are slices of one long cycle, in which each token occurs once.
    """
    cycle = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    starts = LENGTH * torch.arange(ROWS)[:, None] + 5 * step
    tokens = cycle[(starts + torch.arange(LENGTH + 1)) % VOCABULARY]
    mask, position = torch.ones(rows, LENGTH, dtype=torch.bool), torch.arange(LENGTH).expand(rows, LENGTH)
    return [
        Batch(part[:, :-1], part[:, 1:], mask, position, torch.arange(first, first + rows), step=step)
        for first, part in zip(range(0, ROWS, rows), tokens.split(rows), strict=True)
    ]


def losses(settings: tuple[str, ...], steps: int, microbatch: int = ROWS) -> list[float]:
    """Train with AdamW and return the mean loss of each step."""
    run = build_small_run(*settings)
    runtime = runtime_of(run)
    optimizer = registry.build(run.optimizer, run, runtime)
    index, width = runtime.data_coordinate
    own = ROWS // microbatch // width
    found = []
    for step in range(steps):
        result = runtime.step(batches(step, microbatch)[index * own : index * own + own])
        assert result.finite
        runtime.clip(1.0)
        optimizer.step(0.01)
        runtime.finish_update()
        found.append(result.loss_sum / result.tokens)
    return found
