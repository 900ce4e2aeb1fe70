"""Conformance suite for parallel strategies (`gangline_parallel_strategies`): all layouts against one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from gangline.mesh import DATA_AXES, Mesh
from gangline.shard import name_dtype, name_model_array
from gangline_testkit import strategy_ranks as ranks, traffic_ranks as traffic
from gangline_testkit.claims import LAYOUT, LAYOUT_CLAIM, mark_capability
from gangline_testkit.compare import (
    assemble,
    assert_number_close,
    check_mapped_once,
    close,
    compare_all,
    compare_clipped,
)
from gangline_testkit.pool import get_pool
from gangline_testkit.scenarios import (
    ACCUMULATED,
    DOCUMENTS,
    EXACT,
    EXACT_EVALUATION,
    EXACT_TIED,
    FLOAT32,
    FLOAT64,
    LANES,
    PLAIN,
    RECOMPUTED,
    SINGLE,
    TIED,
    RunLayout,
)
from gangline_testkit.strategy_runs import StrategyRuns, get_shapes


class StrategySuite(StrategyRuns):
    """Conformance suite for parallel strategies; subclass it with ``choice = "parallel=mine"``.

    `layouts`: layouts to test; by default 1, 2 and 4 ranks, as the part's `size_axes` lays them out.
    """

    CLAIMS: ClassVar[dict[str, str]] = {
        **LAYOUT_CLAIM,
        "exact": "bit-identical, under run.deterministic, to one process that adds in the same grouping",
        "exact tied": "also where the head uses the embedding's weight (stages that share one cannot)",
    }

    # --- placement ---------------------------------------------------------------------------------------------------

    def test_initial_weights_are_those_of_one_process(self, layout: RunLayout) -> None:
        """Check that initial weights, a function of (seed, name), match one process to the bit."""
        for scenario in (PLAIN, TIED, LANES):
            job = self.make_job(layout, scenario)
            got = self.train_job(job)
            first = self.train_reference(job, got[0].coordinate[1])[0]
            compare_all("initial", self.assemble_shards([of_rank.first for of_rank in got], first), first, 0)

    def test_registry_is_whole_and_the_same_on_every_rank(self, layout: RunLayout) -> None:
        """Check that all ranks have one registry: every array, boxes that tile it, and one holder of each primary."""
        job = self.make_job(layout, LANES)
        registries = [of_rank.registry for of_rank in self.train_job(job)]
        first = registries[0]
        assert all(registry == first for registry in registries)
        arrays = self.train_reference(job, 1)[0]
        assert set(first) == {name_model_array(name) for name in arrays}
        for name, array in arrays.items():
            assert first[name_model_array(name)].shape == tuple(array.shape)
            assert first[name_model_array(name)].dtype == name_dtype(array.dtype)
            boxes = first.list_boxes(name_model_array(name))
            ones = [("box", box.offset, torch.ones(box.shape)) for box in boxes]
            assert sum(box.size for box in boxes) == array.numel(), f"the boxes of {name} overlap, or leave a gap"
            assemble([ones], {"box": tuple(array.shape)})
            for box in boxes:
                rank_boxes = [first.list_rank_boxes(name_model_array(name), rank) for rank in range(layout.world)]
                primaries = [rank for rank, own in enumerate(rank_boxes) if (box, True) in own]
                assert len(primaries) == 1, f"{len(primaries)} primaries of {name}{box}"
                assert first.find_holders(name_model_array(name), box)[0] == primaries[0]

    def test_shards_are_the_boxes_of_the_registry(self, layout: RunLayout) -> None:
        for scenario in (PLAIN, TIED, LANES):
            job = self.make_job(layout, scenario)
            registry = self.train_job(job)[0].registry
            primaries: dict[str, int] = {}
            for rank, shards in enumerate(self.run_on_ranks(ranks.list_shards, job)):
                for name, shape, offset, length, dtype, primary in shards:
                    assert shape == registry[name].shape
                    assert dtype == registry[name].dtype
                    boxes = [(box.offset, box.shape, main) for box, main in registry.list_rank_boxes(name, rank)]
                    tied_copy = not boxes and not primary
                    assert (offset, length, primary) in boxes or tied_copy, f"rank {rank}: {name} at {offset}, {length}"
                    primaries[name] = primaries.get(name, 0) + primary * math.prod(length)
            assert primaries == {name: math.prod(registry[name].shape) for name in registry}

    def test_parameters_are_the_same_on_all_ranks_of_a_stage(self, layout: RunLayout) -> None:
        job = self.make_job(layout, LANES)
        by_stage: dict[int, list] = {}
        for rank, parameters in enumerate(self.run_on_ranks(ranks.list_pieces, job)):
            stage = job.mesh.coordinate(rank)["pp"]
            described = [(name, shape) for name, shape, _ in parameters]
            assert by_stage.setdefault(stage, described) == described, f"rank {rank} has other parameters"
            for name, shape, places in parameters:
                inside = all(
                    o + n <= s for offset, length in places for o, n, s in zip(offset, length, shape, strict=True)
                )
                assert inside, f"rank {rank}: a piece of {name} lies outside of it"

    def test_every_share_of_the_batch_is_read(self, layout: RunLayout) -> None:
        coordinates = [of_rank.coordinate for of_rank in self.train_job(self.make_job(layout, PLAIN))]
        width = coordinates[0][1]
        assert {of for _, of in coordinates} == {width}
        assert sorted({index for index, _ in coordinates}) == list(range(width))

    @mark_capability(LAYOUT)
    def test_matrices_are_mapped_whole_and_once(self, layout: RunLayout) -> None:
        """Check that each matrix, also in a stack, is mapped once and in full, whatever part of it a rank holds."""
        for scenario in (PLAIN, LANES):
            job = self.make_job(layout, scenario)
            want = get_pool(1).run(ranks.expect_mapped, replace(job, mesh=Mesh.of({})))[0]
            check_mapped_once(self.run_on_ranks(ranks.map_matrices, job), want)

    # --- one step ----------------------------------------------------------------------------------------------------

    @mark_capability(LAYOUT)
    def test_loss_and_tokens(self, layout: RunLayout) -> None:
        """Check that loss and tokens are sums over the valid tokens of all ranks, and equal on all ranks."""
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        steps = self.train_reference(job, got[0].coordinate[1])[1]
        for of_rank in got:
            for one, want in zip(of_rank.steps, steps, strict=True):
                assert_number_close("loss", one.loss_sum, want.loss_sum, FLOAT64)
                assert one.tokens == want.tokens
                assert one.finite
                assert one.loss_sum == got[0].steps[of_rank.steps.index(one)].loss_sum, "ranks disagree about the loss"

    @mark_capability(LAYOUT)
    def test_each_rank_says_what_it_added_to_the_loss(self, layout: RunLayout) -> None:
        """Check that the ranks that read one share of the batch add up to the loss and the tokens of that share."""
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        width = got[0].coordinate[1]
        for number, want in enumerate(self.train_reference(job, width)[1]):
            for index, (loss_sum, tokens) in enumerate(want.shares):
                owns = [of_rank.steps[number].own for of_rank in got if of_rank.coordinate[0] == index]
                what = f"own loss of data rank {index}, step {number},"
                assert_number_close(what, sum(own for own, _ in owns), loss_sum, FLOAT64)
                assert sum(count for _, count in owns) == tokens, f"own tokens of data rank {index}"

    @mark_capability(LAYOUT)
    def test_gradients(self, layout: RunLayout) -> None:
        """Check that every element of the gradients matches one process."""
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        want = self.train_reference(job, got[0].coordinate[1])[1][0].gradients
        compare_all("gradient", self.assemble_shards([of_rank.steps[0].held for of_rank in got], want), want, FLOAT64)

    @mark_capability(LAYOUT)
    def test_gradient_norm(self, layout: RunLayout) -> None:
        """Check that the global norm counts each parameter once and is equal on all ranks."""
        for scenario in (PLAIN, TIED, LANES):
            job = self.make_job(layout, scenario)
            got = self.train_job(job)
            want = self.train_reference(job, got[0].coordinate[1])[1][0].norm
            for of_rank in got:
                assert_number_close("norm", of_rank.steps[0].norm, want, FLOAT64)
                assert of_rank.steps[0].norm == got[0].steps[0].norm, "ranks disagree about the norm"

    def test_traffic_is_marked(self, layout: RunLayout) -> None:
        """Check that `mark_traffic` marks traffic: by it, parts that wrap a Comm tell gradients from other sums."""
        job = self.make_job(layout, PLAIN)
        answers = self.run_on_ranks(traffic.count_step, job)
        if job.mesh.size(*DATA_AXES) == 1:
            return
        for index, of_rank in enumerate(answers):
            marked = of_rank.sent["gradients"]
            assert 2 * marked >= of_rank.gradients, (
                f"rank {index} marks {marked} bytes as gradients of {of_rank.gradients}"
            )
        for purpose in ("tokens", "loss"):
            assert any(of_rank.sent[purpose] for of_rank in answers), f"no traffic is marked as {purpose}"

    @mark_capability(LAYOUT)
    def test_clip_scales_all_gradients_alike(self, layout: RunLayout) -> None:
        """Check that `clip` scales all gradients by one factor, down to the norm and never up."""
        job = self.make_job(layout, PLAIN)
        want = self.train_reference(job, 1)[1][0]
        for limit in (0.5 * want.norm, 2.0 * want.norm):
            answers = self.run_on_ranks(ranks.clip_gradients, job, limit)
            assert_number_close("the norm that clip gives", answers[0][0], want.norm, FLOAT64)
            compare_clipped(answers, get_shapes(want.gradients), limit, "norm")

    def test_clip_measures_changed_gradients(self, layout: RunLayout) -> None:
        """Check that gradients multiplied after the step are clipped by their own norm, or that `clip` refuses them."""
        job = self.make_job(layout, PLAIN)
        shapes = get_shapes(self.train_reference(job, 1)[1][0].gradients)
        for answers in zip(*self.run_on_ranks(ranks.clip_changed_gradients, job, 0.5, 10.0), strict=True):
            if None not in answers:  # else a rank refused, which ends the run
                compare_clipped(answers, shapes, 0.5, "norm of gradients times 10")

    @mark_capability(LAYOUT)
    def test_float32_step(self, layout: RunLayout) -> None:
        self.compare(layout, SINGLE, FLOAT32)

    @mark_capability(LAYOUT)
    def test_tied_weights(self, layout: RunLayout) -> None:
        """Check that a tied weight is one parameter, which counts once and whose gradient is the sum of both uses."""
        self.compare(layout, TIED, FLOAT64)

    @mark_capability(LAYOUT)
    def test_documents_and_positions(self, layout: RunLayout) -> None:
        self.compare(layout, DOCUMENTS, FLOAT64)

    @mark_capability(LAYOUT)
    def test_accumulation(self, layout: RunLayout) -> None:
        """Check several microbatches of several samples against one process."""
        self.compare(layout, ACCUMULATED, FLOAT64)

    @mark_capability(LAYOUT)
    def test_recomputation_changes_nothing(self, layout: RunLayout) -> None:
        """Check that under recomputation emitted values count once, and random draws are repeated."""
        self.compare(layout, RECOMPUTED, FLOAT64)

    def test_a_step_in_which_no_target_counts(self, layout: RunLayout) -> None:
        for of_rank in self.run_on_ranks(ranks.step_without_targets, self.make_job(layout, PLAIN)):
            assert (of_rank.loss_sum, of_rank.tokens, of_rank.finite, of_rank.norm) == (0.0, 0, True, 0.0)
            assert not any(bool(gradient.any()) for _, _, gradient in of_rank.held)

    @pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
    def test_not_finite_on_one_rank_is_known_to_all(self, layout: RunLayout, value: float) -> None:
        """Check that all ranks report a step that is not finite on one rank, and that the next step is unaffected."""
        job = self.make_job(layout, PLAIN)
        answers = self.run_on_ranks(ranks.step_bad_sample, job, value)
        for bad, good in answers:
            assert not bad.finite, "a step that was not finite on one rank counts as finite on another"
            assert good.finite
            assert_number_close("norm after it", good.norm, answers[0][1].norm, 0)
        assert all(bool(torch.isfinite(gradient).all()) for _, good in answers for _, _, gradient in good.held)

    # --- several steps -----------------------------------------------------------------------------------------------

    @mark_capability(LAYOUT)
    def test_weights_after_several_steps(self, layout: RunLayout) -> None:
        """Check that weights written by an optimizer match one process, with equal bits in all replicas."""
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        last = self.train_reference(job, got[0].coordinate[1])[2]
        compare_all("weights", self.assemble_shards([of_rank.last for of_rank in got], last), last, FLOAT64)

    @mark_capability(LAYOUT)
    def test_evaluate(self, layout: RunLayout) -> None:
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        loss_sum, tokens = self.train_reference(job, got[0].coordinate[1])[3]
        for of_rank in got:
            assert_number_close("evaluated loss", of_rank.evaluated[0], loss_sum, FLOAT64)
            assert of_rank.evaluated[1] == tokens

    @mark_capability(LAYOUT)
    def test_score(self, layout: RunLayout) -> None:
        """Check that all ranks get each sample's log-likelihood in global order, with equal bits; 0 for padding."""
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        scores = self.train_reference(job, got[0].coordinate[1])[4]
        for of_rank in got:
            close("score of sample", of_rank.scores, scores, FLOAT64)
            close("score of sample, between two ranks,", of_rank.scores, got[0].scores, 0)
        assert got[0].scores[-1] == 0

    def test_score_refuses_shares_that_do_not_fit(self, layout: RunLayout) -> None:
        """Check that all ranks raise the same ValueError if a share of the batch has the wrong size: none may hang."""
        for answers in zip(*self.run_on_ranks(ranks.score_misfits, self.make_job(layout, PLAIN)), strict=True):
            assert len(set(answers)) == 1, f"the ranks say {answers}"
            assert answers[0].startswith("ValueError"), f"score took shares that do not fit: {answers[0]}"

    def test_what_is_written_through_shards_is_computed_with(self, layout: RunLayout) -> None:
        """Check that the model computes with values written through shards, as a load of a checkpoint writes them."""
        job = self.make_job(layout, PLAIN)
        want = get_pool(1).run(ranks.expect_written, replace(job, mesh=Mesh.of({})), 1.5)[0]
        for loss_sum, tokens in self.run_on_ranks(ranks.write_and_evaluate, job, 1.5):
            assert_number_close("evaluated loss", loss_sum, want[0], FLOAT64)
            assert tokens == want[1]

    def test_two_runs_of_one_layout_are_bit_identical(self, layout: RunLayout) -> None:
        """Check that two runs of one layout are bit-identical under run.deterministic."""
        job = self.make_job(layout, EXACT)
        one, two = self.train_job(job), self.run_on_ranks(ranks.train, job)
        for first, second in zip(one, two, strict=True):
            assert [(s.loss_sum, s.norm) for s in first.steps] == [(s.loss_sum, s.norm) for s in second.steps]
            for (name, _, before), (_, _, after) in zip(first.last, second.last, strict=True):
                close(f"second run: {name}", after, before, 0)

    @mark_capability("exact")
    def test_bit_identical_to_one_process(self, layout: RunLayout) -> None:
        self.compare(layout, EXACT, 0)

    @mark_capability("exact")
    def test_an_evaluation_is_bit_identical_to_one_process(self, layout: RunLayout) -> None:
        """Check that losses are added in the order of the samples, on any number of ranks, bit for bit."""
        self.compare(layout, EXACT_EVALUATION, 0)

    @mark_capability("exact tied")
    def test_bit_identical_with_tied_weights(self, layout: RunLayout) -> None:
        self.compare(layout, EXACT_TIED, 0)

    # --- folds and emitted values ------------------------------------------------------------------------------------

    @mark_capability(LAYOUT)
    def test_a_module_on_a_fold(self, layout: RunLayout) -> None:
        """Check that gradients of a module on a fold are summed over the ranks of `fold_rest`, and no others."""
        self.compare(layout, LANES, FLOAT64)

    @mark_capability(LAYOUT)
    def test_emitted_metrics(self, layout: RunLayout) -> None:
        """Check that sums, means, maxima and loss terms count each token once and are equal on all ranks."""
        for scenario in (LANES, RECOMPUTED):
            job = self.make_job(layout, scenario)
            got = self.train_job(job)
            steps = self.train_reference(job, got[0].coordinate[1])[1]
            for of_rank in got:
                for one, want in zip(of_rank.steps, steps, strict=True):
                    missing = sorted(set(want.metrics) - set(one.metrics))  # a strategy may report more
                    assert not missing, f"metrics that modules emitted are missing: {', '.join(missing)}"
                    for name, value in want.metrics.items():
                        metric = torch.tensor(one.metrics[name], dtype=torch.float64)
                        close(f"metric {name}", metric, torch.tensor(value, dtype=torch.float64), FLOAT64)

    @mark_capability(LAYOUT)
    def test_emitted_loss_reaches_the_gradients(self, layout: RunLayout) -> None:
        """Check that the objective is (loss + terms) / global tokens, and that the reported loss excludes the terms."""
        job = self.make_job(layout, LANES)
        got = self.train_job(job)
        want = self.train_reference(job, got[0].coordinate[1])[1][0]
        assert_number_close("loss without the terms", got[0].steps[0].loss_sum, want.loss_sum, FLOAT64)
        gradients = self.assemble_shards([of_rank.steps[0].held for of_rank in got], want.gradients)
        compare_all("gradient", gradients, want.gradients, FLOAT64)

    @mark_capability(LAYOUT)
    def test_modules_are_told_after_the_step(self, layout: RunLayout) -> None:
        """Check that `after_step` gets emitted values reduced over the whole step, and that its buffer is state."""
        job = self.make_job(layout, LANES)
        got = self.train_job(job)
        last = self.train_reference(job, got[0].coordinate[1])[2]
        arrays = self.assemble_shards([of_rank.last for of_rank in got], last)
        buffers = [name for name in last if name.endswith(".balance")]
        assert buffers
        for name in buffers:
            assert bool(last[name].any()), "the toy module has learnt nothing"
            close(name, arrays[name], last[name], FLOAT64)
