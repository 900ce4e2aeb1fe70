"""Checks of batch.ramp: the batch size must grow, and each stage must fit the layout. Torch-free."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

from gangline.config.ranges import list_divisors
from gangline.config.schema import Run
from gangline.errors import Problem

EXAMPLE = "batch.ramp={4: 8000, 8: 24000} batch.global_size=16"


def find_ramp_problems(run: Run, width: int) -> list[Problem]:
    """Return the problems of the ramp's stages before the full batch size, on `width` data-parallel ranks."""
    batch = run.batch
    if not batch.ramp:
        return []
    sizes, ends = batch.list_sizes(), list(batch.ramp.values())
    if sizes != sorted(set(sizes)) or len(set(ends)) < len(ends):
        stages = ", ".join(f"{size} until sample {batch.ramp[size]}" for size in sizes[:-1])
        what = f"the sizes of batch.ramp must grow up to batch.global_size={batch.global_size}, but are: {stages}."
        return [Problem(what, "batch.ramp maps a batch size to the sample that ends its stage.", f"Example: {EXAMPLE}")]
    if batch.micro_size is None:
        choices = list_divisors(math.gcd(*sizes) // width) if math.gcd(*sizes) >= width else ""
        fix = f"Choose batch.micro_size among {choices}." if choices else f"Choose sizes divisible by {width} ranks."
        return [Problem("batch.ramp needs batch.micro_size.", "All stages have one microbatch size.", fix)]
    return [problem for size in sizes[:-1] for problem in _check_stage(run, size, batch.micro_size, width)]


def _check_stage(run: Run, size: int, micro_size: int, width: int) -> list[Problem]:
    """Return problems of a ramp stage of `size` sequences per step: divisibility, else the strategy's own problems."""
    whole = micro_size * width
    if size % whole:
        near = sorted({max(whole, size // whole * whole), -(-size // whole) * whole})
        what = f"batch.ramp: {size} is not divisible by batch.micro_size={micro_size} x {width} data-parallel ranks."
        why = "Every rank gets an equal share of the global batch; a different global batch size changes the run."
        return [Problem(what, why, f"Nearest: {' or '.join(map(str, near))}; or a smaller batch.micro_size.")]
    stage, usual = copy.copy(run), run.parallel.check(run)
    stage.batch = replace(run.batch, global_size=size, ramp={})
    problems = [problem for problem in run.parallel.check(stage) if problem not in usual]
    return [replace(problem, what=f"batch.ramp, stage with batch size {size}: {problem.what}") for problem in problems]
