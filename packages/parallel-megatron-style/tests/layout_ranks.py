"""Layout compositions as lines of text, judged by the conformance suite for strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gangline.config.check import find_layout_problems
from gangline.errors import Problem
from gangline.plan import Fold
from gangline.shard import name_dtype
from gangline_parallel_megatron_style.layout import fits
from gangline_testkit import StrategySuite, rank, strategy_ranks
from gangline_testkit.compare import assert_number_close, close
from gangline_testkit.scenarios import FLOAT64, RunLayout, Scenario
from gangline_testkit.strategy_ranks import StrategyJob

LENGTH = 16  # tokens: divisible over cp 4 in zig-zag halves, and over cp 2 x tp 4


@dataclass(frozen=True)
class Composition:
    """A layout and the run that trains on it.

    on: axes and options of the strategy, such as "pp=2 tp=2 zero=3"; an axis that is not listed has one rank.
    model: options of the model, such as "layers=4 kv_heads=1".
    more: complete settings, such as "batch.micro_size=2".
    batches: "ragged" (loss masks of every length, including 0), "documents" or "whole".
    lanes: size of the fold of core's toy module, which is made from the axes `out_of`; 0: no toy module.
    """

    on: str
    model: str = ""
    more: str = ""
    batches: str = "ragged"
    lanes: int = 0
    out_of: tuple[str, ...] = ("dp_shard",)
    dtype: torch.dtype = torch.float64
    steps: int = 2
    bound: float = FLOAT64  # relative to the largest magnitude of an array; 0: bit-identical
    deterministic: bool = False  # add up in rank order

    def __str__(self) -> str:
        fold = f"lanes={self.lanes}/{'+'.join(self.out_of)}" if self.lanes else ""
        kind = "" if self.batches == "ragged" else self.batches
        dtype = "" if self.dtype is torch.float64 else name_dtype(self.dtype)
        return " ".join(word for word in (self.on, self.model, self.more, kind, fold, dtype) if word)

    @property
    def layout(self) -> RunLayout:
        return RunLayout.from_words(self.on)

    @property
    def scenario(self) -> Scenario:
        settings = [f"batch.sequence_length={LENGTH}", f"run.deterministic={str(self.deterministic).lower()}"]
        settings += [f"model.{word}" for word in self.model.split()]
        return Scenario((*settings, *self.more.split()), self.batches, self.dtype, self.lanes, steps=self.steps)

    @property
    def world(self) -> int:
        return self.layout.world


class Layouts(StrategySuite):
    """Suite for strategies, run on compositions of `parallel=3d`."""

    choice = "parallel=3d"

    def job_of(self, composition: Composition) -> StrategyJob:
        """Return the job of the ranks; fail if `train` would refuse the composition."""
        assert not (problems := self.problems(composition)), "\n".join(map(str, problems))
        return self.make_job(composition.layout, composition.scenario)

    def problems(self, composition: Composition) -> list[Problem]:
        """Return the problems for which `train` would refuse the layout of the composition."""
        self.out_of = composition.out_of
        job = self.make_job(composition.layout, composition.scenario)
        run = job.run
        folds = fits.find_problems(run.parallel, run, job.mesh, job.tree, job.plan)
        return [*run.parallel.check(run), *find_layout_problems(run), *folds]

    def make_job(self, layout: RunLayout, scenario: Scenario) -> StrategyJob:
        job = super().make_job(layout, scenario)
        folds = tuple(Fold(fold.name, fold.size, self.out_of) for fold in job.plan.folds)
        return replace(job, plan=replace(job.plan, folds=folds))

    def holds(self, composition: Composition) -> None:
        """Compare loss, gradients, norm, weights, evaluation and metrics with one process and between ranks."""
        job = self.job_of(composition)
        self.compare(composition.layout, composition.scenario, composition.bound)
        got = self.train_job(job)
        steps = self.train_reference(job, got[0].coordinate[1])[1]
        for of_rank in got:
            assert of_rank.evaluated == got[0].evaluated, "ranks disagree about the evaluation"
            for one, first, want in zip(of_rank.steps, got[0].steps, steps, strict=True):
                assert (one.loss_sum, one.tokens, one.norm) == (first.loss_sum, first.tokens, first.norm)
                for name, value in want.metrics.items():
                    found, wanted = (torch.tensor(x, dtype=torch.float64) for x in (one.metrics[name], value))
                    close(f"metric {name}", found, wanted, composition.bound)

    def same_twice(self, composition: Composition) -> None:
        """Check that two runs are bit-identical on every rank."""
        job = self.job_of(composition)
        one, two = (self.run_on_ranks(strategy_ranks.train, job) for _ in range(2))
        for first, second in zip(one, two, strict=True):
            assert first.evaluated == second.evaluated
            for before, after in zip(first.steps, second.steps, strict=True):
                assert (before.loss_sum, before.norm) == (after.loss_sum, after.norm)
            for (name, _, before), (_, _, after) in zip(first.last, second.last, strict=True):
                close(f"second run: {name}", after, before, 0)

    def any_rank_stops_all(self, composition: Composition, culprits: Sequence[int]) -> None:
        """Check that a non-finite value on one rank makes the step non-finite on all ranks, and no later step."""
        answers = self.run_on_ranks(one_bad_rank, self.job_of(composition), culprits)
        for index, (before, finite, after) in enumerate(answers):
            unknown = [culprit for culprit, flags in zip(culprits, finite, strict=True) if any(flags)]
            assert not unknown, f"rank {index} does not know that the ranks {unknown} are not finite: {finite}"
            assert_number_close("norm after it", after, before, 0)
            assert math.isfinite(after)


def one_bad_rank(job: StrategyJob, culprits: Sequence[int]) -> tuple[float, list[tuple[bool, bool]], float]:
    """Return (norm before, whether each step with a fault counts as finite, norm after); a pair of steps per culprit.

    The first fault is a NaN array on the rank, which makes the loss and all gradients NaN. The second fault is a NaN
    element in the gradient of the output of the rank's first module. The loss and the modules after the first module do
    not change.
    """
    runtime = strategy_ranks.start(job)
    batches = job.share(0, *runtime.data_coordinate)
    array = next(shard.local for shard in runtime.shards() if shard.local.numel() and shard.local.dim() > 1)
    kept = array.clone()
    first = runtime.stages[0].segments[0].module  # type: ignore[attr-defined]
    before = strategy_ranks.run_step(runtime, batches).norm
    finite = []
    for culprit in culprits:
        if rank.index == culprit:
            array.detach().fill_(math.nan)
        by_weights = strategy_ranks.run_step(runtime, batches).finite
        array.detach().copy_(kept)
        hook = first.register_forward_hook(_spoil_gradient) if rank.index == culprit else None
        finite.append((by_weights, strategy_ranks.run_step(runtime, batches).finite))
        if hook is not None:
            hook.remove()
    return before, finite, strategy_ranks.run_step(runtime, batches).norm


def _spoil_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Make the gradient of the output NaN at the first token and feature."""
    spoilt = torch.zeros_like(output)
    spoilt[0, 0, 0] = math.nan
    output.register_hook(lambda gradient: gradient + spoilt)
