"""Training runs of `StrategySuite` on ranks, and of the reference in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline_testkit import strategy_ranks as ranks
from gangline_testkit.compare import Held, assemble, assert_number_close, close, compare_all
from gangline_testkit.pool import get_pool
from gangline_testkit.scenarios import RunLayout, Scenario
from gangline_testkit.strategy_ranks import StrategyJob, Trained
from gangline_testkit.suite import PartSuite
from gangline_testkit.toys.plugin import Lanes, edit_lanes

_done: dict[str, Any] = {}  # results by job: many tests read the results of one run


class StrategyRuns(PartSuite):
    """Base of `StrategySuite` that runs a strategy in each layout."""

    layouts: ClassVar[tuple[RunLayout, ...] | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", self.layouts or list(self._iterate_layouts()), ids=str)

    def _iterate_layouts(self) -> Iterator[RunLayout]:
        for world in (1, 2, 4):
            with suppress(UserError):
                self.run().parallel.size_axes(world)
                yield RunLayout(world)

    def make_job(self, layout: RunLayout, scenario: Scenario) -> StrategyJob:
        """Return the job of a scenario in a layout, composed as core composes it."""
        run = self.run("run.deterministic=false", *layout.settings, *scenario.settings)
        tree, plan = compose_model(run)
        if scenario.lanes:
            tree, plan, _ = edit_lanes(tree, plan, Lanes(fold=scenario.lanes))
        mesh = Mesh.of(run.parallel.size_axes(layout.world))
        assert mesh.world == layout.world, f"size_axes({layout.world}) returns a mesh of {mesh.world} ranks"
        build = self.offer.part.build
        return StrategyJob(
            build, run, tree, plan, mesh, scenario.dtype, scenario.batches, scenario.steps, scenario.recompute
        )

    def run_on_ranks(self, body: Any, job: StrategyJob, *args: Any) -> list[Any]:
        """Run a body on all ranks of the job's mesh, and return the results in rank order."""
        return get_pool(job.mesh.world).run(body, job, *args)

    def train_job(self, job: StrategyJob) -> list[Trained]:
        """Return the results of each rank; the job runs once and its results are cached."""
        key = f"{type(self).__qualname__} {job.make_key()}"
        if key not in _done:
            _done[key] = self.run_on_ranks(ranks.train, job)
        return _done[key]

    def train_reference(self, job: StrategyJob, width: int) -> Any:
        """Return the results of the reference, which groups microbatches as `width` data ranks do; cached."""
        plain = replace(job, build="", mesh=Mesh.of({}), recompute=False)
        key = f"{width} {replace(plain, run=_drop_strategy(plain.run)).make_key()}"
        if key not in _done:
            _done[key] = get_pool(1).run(ranks.expect, plain, width)[0]
        return _done[key]

    def assemble_shards(self, per_rank: list[list[Held]], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return full arrays, assembled from the shards of all ranks, with the shapes of the reference arrays."""
        return assemble(per_rank, get_shapes(names))

    def compare(self, layout: RunLayout, scenario: Scenario, relative: float) -> None:
        """Assert that all results of a training run match the reference."""
        job = self.make_job(layout, scenario)
        got = self.train_job(job)
        width = got[0].coordinate[1]
        _, steps, last, evaluated, scores = self.train_reference(job, width)
        for number, want in enumerate(steps):
            one = got[0].steps[number]
            assert_number_close(f"loss of step {number}", one.loss_sum, want.loss_sum, relative)
            assert one.tokens == want.tokens
            gradients = self.assemble_shards([of_rank.steps[number].held for of_rank in got], want.gradients)
            compare_all(f"step {number}: gradient", gradients, want.gradients, relative)
            assert_number_close(f"gradient norm of step {number}", one.norm, want.norm, relative)
        compare_all("final array", self.assemble_shards([of_rank.last for of_rank in got], last), last, relative)
        assert_number_close("evaluated loss", got[0].evaluated[0], evaluated[0], relative)
        close("score of sample", got[0].scores, scores, relative)


def _drop_strategy(run: Any) -> Any:
    """Return the run without its strategy, which the reference does not read."""
    return replace(run, parallel=None)


def get_shapes(arrays: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array."""
    return {name: tuple(array.shape) for name, array in arrays.items()}
