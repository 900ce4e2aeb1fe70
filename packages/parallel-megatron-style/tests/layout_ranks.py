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

LENGTH = 16  # tokens: divides over cp 4 in zig-zag halves, and over cp 2 x tp 4


@dataclass(frozen=True)
class Composition:
    """A layout and what trains on it.

    on: axes and options of the strategy, "pp=2 tp=2 zero=3"; axes that are not named have one rank.
    model: options of the model, "layers=4 kv_heads=1"; more: whole settings, "batch.micro_size=2".
    batches: "ragged" masks (some samples count nothing), "documents", or "whole".
    lanes: the size of a fold on which core's toy module lies, taken out of the axes `out_of`; 0: no such module.
    """

    on: str
    model: str = ""
    more: str = ""
    batches: str = "ragged"
    lanes: int = 0
    out_of: tuple[str, ...] = ("dp_shard",)
    dtype: torch.dtype = torch.float64
    steps: int = 2
    bound: float = FLOAT64  # relative to the largest magnitude of an array; 0: the same bits
    deterministic: bool = False  # sums in rank order

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
    """The suite's machinery for the composed strategy."""

    choice = "parallel=3d"

    def job_of(self, composition: Composition) -> StrategyJob:
        """What the ranks do. The composition must be one that `train` accepts."""
        assert not (problems := self.problems(composition)), "\n".join(map(str, problems))
        return self.make_job(composition.layout, composition.scenario)

    def problems(self, composition: Composition) -> list[Problem]:
        """Why `train` would refuse the composition's layout."""
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
        """Loss, gradients, norm, weights, evaluation and what modules emit, against one process; ranks agree."""
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
        """Two runs give the same bits on every rank."""
        job = self.job_of(composition)
        one, two = (self.run_on_ranks(strategy_ranks.train, job) for _ in range(2))
        for first, second in zip(one, two, strict=True):
            assert first.evaluated == second.evaluated
            for before, after in zip(first.steps, second.steps, strict=True):
                assert (before.loss_sum, before.norm) == (after.loss_sum, after.norm)
            for (name, _, before), (_, _, after) in zip(first.last, second.last, strict=True):
                close(f"second run: {name}", after, before, 0)

    def any_rank_stops_all(self, composition: Composition, culprits: Sequence[int]) -> None:
        """What is not finite on one rank alone is known to every rank, and is gone with its cause."""
        answers = self.run_on_ranks(one_bad_rank, self.job_of(composition), culprits)
        for index, (before, finite, after) in enumerate(answers):
            unknown = [culprit for culprit, flags in zip(culprits, finite, strict=True) if any(flags)]
            assert not unknown, f"rank {index} does not know that the ranks {unknown} are not finite: {finite}"
            assert_number_close("norm after it", after, before, 0)
            assert math.isfinite(after)


def one_bad_rank(job: StrategyJob, culprits: Sequence[int]) -> tuple[float, list[tuple[bool, bool]], float]:
    """(norm, for each culprit whether the step counts as finite with that rank broken, norm when all is well again).

    Broken in two ways: an array that the rank holds is not a number, which comes into the loss and all gradients; or
    one element of the gradient that comes back to the first module of the rank, which leaves the loss, and whatever
    lies behind that module, as they were.
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
    """Of the first token and feature."""
    spoilt = torch.zeros_like(output)
    spoilt[0, 0, 0] = math.nan
    output.register_hook(lambda gradient: gradient + spoilt)
