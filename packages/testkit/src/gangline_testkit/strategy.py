"""Conformance suite for parallel strategies (hook `gangline_parallel_strategies`): each layout against one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from gangline.mesh import DATA_AXES, Mesh
from gangline.shard import name_dtype, name_model_array
from gangline_testkit import strategy_ranks as ranks, traffic_ranks as traffic
from gangline_testkit.claims import LAYOUT, mark_capability
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

    layouts  layouts to test; by default those that the part's `size_axes` returns for 1, 2 and 4 ranks
    """

    CLAIMS: ClassVar[dict[str, str]] = {
        LAYOUT: "Training in every layout matches one process (implied unless `Part.layout_dependent` is set).",
        "exact": "Training is bit-identical to one process that sums in equal groups (run.deterministic).",
        "exact tied": "Bit-identity also holds for tied weights (not possible across pipeline stages).",
    }

    # --- placement ---------------------------------------------------------------------------------------------------

    def test_initial_weights_match_one_process(self, layout: RunLayout) -> None:
        """Check that initial weights, a function of (seed, name), are bit-identical to one process."""
        for scenario in (PLAIN, TIED, LANES):
            job = self.make_job(layout, scenario)
            got = self.train_job(job)
            first = self.train_reference(job, got[0].coordinate[1])[0]
            compare_all("initial array", self.assemble_shards([of_rank.first for of_rank in got], first), first, 0)

    def test_registry_is_complete_and_equal_on_all_ranks(self, layout: RunLayout) -> None:
        """Check that all ranks have equal registries: all arrays, boxes that tile each array, one primary per box."""
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
            assert sum(box.size for box in boxes) == array.numel(), (
                f"the registry's boxes of {name} overlap or leave a gap"
            )
            assemble([ones], {"box": tuple(array.shape)})
            for box in boxes:
                rank_boxes = [first.list_rank_boxes(name_model_array(name), rank) for rank in range(layout.world)]
                primaries = [rank for rank, own in enumerate(rank_boxes) if (box, True) in own]
                assert len(primaries) == 1, f"{name}{box} has {len(primaries)} primary ranks, expected 1"
                assert first.find_holders(name_model_array(name), box)[0] == primaries[0]

    def test_shards_match_the_boxes_of_the_registry(self, layout: RunLayout) -> None:
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
                    assert (offset, length, primary) in boxes or tied_copy, (
                        f"rank {rank}: the registry has no box of {name} at {offset} with shape {length}"
                    )
                    primaries[name] = primaries.get(name, 0) + primary * math.prod(length)
            assert primaries == {name: math.prod(registry[name].shape) for name in registry}

    def test_parameter_names_are_equal_on_all_ranks_of_a_stage(self, layout: RunLayout) -> None:
        job = self.make_job(layout, LANES)
        by_stage: dict[int, list] = {}
        for rank, parameters in enumerate(self.run_on_ranks(ranks.list_pieces, job)):
            stage = job.mesh.coordinate(rank)["pp"]
            described = [(name, shape) for name, shape, _ in parameters]
            assert by_stage.setdefault(stage, described) == described, (
                f"rank {rank} has other parameter names or shapes than the first rank of stage {stage}"
            )
            for name, shape, places in parameters:
                inside = all(
                    o + n <= s for offset, length in places for o, n, s in zip(offset, length, shape, strict=True)
                )
                assert inside, f"rank {rank}: a piece of {name} is outside of the parameter's shape {shape}"

    def test_every_share_of_the_batch_is_read(self, layout: RunLayout) -> None:
        coordinates = [of_rank.coordinate for of_rank in self.train_job(self.make_job(layout, PLAIN))]
        width = coordinates[0][1]
        assert {of for _, of in coordinates} == {width}
        assert sorted({index for index, _ in coordinates}) == list(range(width))

    @mark_capability(LAYOUT)
    def test_each_full_matrix_is_mapped_once(self, layout: RunLayout) -> None:
        """Check that `map_matrices` maps each full matrix once, including each of stacked matrices, in any sharding."""
        for scenario in (PLAIN, LANES):
            job = self.make_job(layout, scenario)
            want = get_pool(1).run(ranks.expect_mapped, replace(job, mesh=Mesh.of({})))[0]
            check_mapped_once(self.run_on_ranks(ranks.map_matrices, job), want)

    # --- one step ----------------------------------------------------------------------------------------------------

    @mark_capability(LAYOUT)
    def test_loss_and_tokens_match_one_process(self, layout: RunLayout) -> None:
        """Check that loss and tokens are sums over the valid tokens of all ranks, with equal results on all ranks."""
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        steps = self.train_reference(job, got[0].coordinate[1])[1]
        for of_rank in got:
            for one, want in zip(of_rank.steps, steps, strict=True):
                assert_number_close("loss", one.loss_sum, want.loss_sum, FLOAT64)
                assert one.tokens == want.tokens
                assert one.finite
                assert one.loss_sum == got[0].steps[of_rank.steps.index(one)].loss_sum, "the loss differs between ranks"

    @mark_capability(LAYOUT)
    def test_own_losses_add_up_to_the_loss_of_the_share(self, layout: RunLayout) -> None:
        """Check that `own_loss_sum` and `own_tokens` of the ranks of a data coordinate add up to those of its share."""
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        width = got[0].coordinate[1]
        for number, want in enumerate(self.train_reference(job, width)[1]):
            for index, (loss_sum, tokens) in enumerate(want.shares):
                owns = [of_rank.steps[number].own for of_rank in got if of_rank.coordinate[0] == index]
                what = f"sum of own_loss_sum of data rank {index} in step {number}"
                assert_number_close(what, sum(own for own, _ in owns), loss_sum, FLOAT64)
                assert sum(count for _, count in owns) == tokens, (
                    f"own_tokens of data rank {index} in step {number} do not sum to {tokens}"
                )

    @mark_capability(LAYOUT)
    def test_gradients_match_one_process(self, layout: RunLayout) -> None:
        """Check that every gradient element of the first step matches one process."""
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        want = self.train_reference(job, got[0].coordinate[1])[1][0].gradients
        compare_all("gradient", self.assemble_shards([of_rank.steps[0].held for of_rank in got], want), want, FLOAT64)

    @mark_capability(LAYOUT)
    def test_gradient_norm_matches_one_process(self, layout: RunLayout) -> None:
        """Check that the global gradient norm counts each parameter once and is equal on all ranks."""
        for scenario in (PLAIN, TIED, LANES):
            job = self.make_job(layout, scenario)
            got = self.train_job(job)
            want = self.train_reference(job, got[0].coordinate[1])[1][0].norm
            for of_rank in got:
                assert_number_close("gradient norm", of_rank.steps[0].norm, want, FLOAT64)
                assert of_rank.steps[0].norm == got[0].steps[0].norm, "the gradient norm differs between ranks"

    def test_traffic_is_marked_with_its_purpose(self, layout: RunLayout) -> None:
        """Check that traffic is marked by `mark_traffic`, because parts that wrap a Comm depend on the purposes."""
        job = self.make_job(layout, PLAIN)
        answers = self.run_on_ranks(traffic.count_step, job)
        if job.mesh.size(*DATA_AXES) == 1:
            return
        for index, of_rank in enumerate(answers):
            marked = of_rank.sent["gradients"]
            assert 2 * marked >= of_rank.gradients, (
                f"rank {index} marks {marked} sent bytes as gradients; expected at least half of {of_rank.gradients}"
            )
        for purpose in ("tokens", "loss"):
            assert any(of_rank.sent[purpose] for of_rank in answers), (
                f"no rank marks traffic as {purpose!r} (`mark_traffic`)"
            )

    @mark_capability(LAYOUT)
    def test_clip_scales_all_gradients_by_one_factor(self, layout: RunLayout) -> None:
        """Check that `clip` scales all gradients by one factor, down to the maximum norm and never up."""
        job = self.make_job(layout, PLAIN)
        want = self.train_reference(job, 1)[1][0]
        for limit in (0.5 * want.norm, 2.0 * want.norm):
            answers = self.run_on_ranks(ranks.clip_gradients, job, limit)
            assert_number_close("norm returned by clip", answers[0][0], want.norm, FLOAT64)
            compare_clipped(answers, get_shapes(want.gradients), limit, "norm returned by clip")

    def test_clip_measures_or_refuses_changed_gradients(self, layout: RunLayout) -> None:
        """Check that `clip` measures gradients that were changed after the step, or refuses them by an exception."""
        job = self.make_job(layout, PLAIN)
        shapes = get_shapes(self.train_reference(job, 1)[1][0].gradients)
        for answers in zip(*self.run_on_ranks(ranks.clip_changed_gradients, job, 0.5, 10.0), strict=True):
            if None not in answers:  # None: a rank raised an exception, which ends the run
                compare_clipped(answers, shapes, 0.5, "norm of gradients times 10")

    @mark_capability(LAYOUT)
    def test_float32_step_matches_one_process(self, layout: RunLayout) -> None:
        self.compare(layout, SINGLE, FLOAT32)

    @mark_capability(LAYOUT)
    def test_tied_weights_match_one_process(self, layout: RunLayout) -> None:
        """Check that a tied weight is one parameter: it counts once, and its gradient is the sum over both uses."""
        self.compare(layout, TIED, FLOAT64)

    @mark_capability(LAYOUT)
    def test_document_batches_match_one_process(self, layout: RunLayout) -> None:
        self.compare(layout, DOCUMENTS, FLOAT64)

    @mark_capability(LAYOUT)
    def test_accumulated_microbatches_match_one_process(self, layout: RunLayout) -> None:
        """Check that a step with several microbatches of several samples matches one process."""
        self.compare(layout, ACCUMULATED, FLOAT64)

    @mark_capability(LAYOUT)
    def test_recomputed_step_matches_one_process(self, layout: RunLayout) -> None:
        """Check that recomputation counts emitted values once and repeats random draws."""
        self.compare(layout, RECOMPUTED, FLOAT64)

    def test_step_without_targets_has_zero_loss_and_gradients(self, layout: RunLayout) -> None:
        for of_rank in self.run_on_ranks(ranks.step_without_targets, self.make_job(layout, PLAIN)):
            assert (of_rank.loss_sum, of_rank.tokens, of_rank.finite, of_rank.norm) == (0.0, 0, True, 0.0)
            assert not any(bool(gradient.any()) for _, _, gradient in of_rank.held)

    @pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
    def test_nonfinite_step_on_one_rank_is_reported_by_all(self, layout: RunLayout, value: float) -> None:
        """Check that all ranks report a step that is not finite on one rank, and that the next step is not affected."""
        job = self.make_job(layout, PLAIN)
        answers = self.run_on_ranks(ranks.step_bad_sample, job, value)
        for bad, good in answers:
            assert not bad.finite, "a step that is not finite on one rank counts as finite on another rank"
            assert good.finite
            assert_number_close("gradient norm of the step after the nonfinite step", good.norm, answers[0][1].norm, 0)
        assert all(bool(torch.isfinite(gradient).all()) for _, good in answers for _, _, gradient in good.held)

    # --- several steps -----------------------------------------------------------------------------------------------

    @mark_capability(LAYOUT)
    def test_weights_after_several_steps_match_one_process(self, layout: RunLayout) -> None:
        """Check that weights after several optimizer steps match one process, and are bit-identical in all replicas."""
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        last = self.train_reference(job, got[0].coordinate[1])[2]
        compare_all("final array", self.assemble_shards([of_rank.last for of_rank in got], last), last, FLOAT64)

    @mark_capability(LAYOUT)
    def test_evaluated_loss_matches_one_process(self, layout: RunLayout) -> None:
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        loss_sum, tokens = self.train_reference(job, got[0].coordinate[1])[3]
        for of_rank in got:
            assert_number_close("evaluated loss", of_rank.evaluated[0], loss_sum, FLOAT64)
            assert of_rank.evaluated[1] == tokens

    @mark_capability(LAYOUT)
    def test_scores_match_one_process(self, layout: RunLayout) -> None:
        """Check that `score` returns log-likelihoods in global order, bit-identical on all ranks; 0 for padding."""
        job = self.make_job(layout, PLAIN)
        got = self.train_job(job)
        scores = self.train_reference(job, got[0].coordinate[1])[4]
        for of_rank in got:
            close("score of sample", of_rank.scores, scores, FLOAT64)
            close("score of sample, compared with rank 0,", of_rank.scores, got[0].scores, 0)
        assert got[0].scores[-1] == 0

    def test_score_refuses_shares_of_wrong_size(self, layout: RunLayout) -> None:
        """Check that all ranks raise the same ValueError if a share has the wrong size, so that no rank hangs."""
        for answers in zip(*self.run_on_ranks(ranks.score_misfits, self.make_job(layout, PLAIN)), strict=True):
            assert len(set(answers)) == 1, f"the ranks raise different errors: {answers}"
            assert answers[0].startswith("ValueError"), (
                f"`score` must raise ValueError for shares of wrong size, and returns {answers[0]}"
            )

    def test_values_written_through_shards_are_used(self, layout: RunLayout) -> None:
        """Check that the model computes with values written into its shards, as a load of a checkpoint writes them."""
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
                close(f"{name} of the second run", after, before, 0)

    @mark_capability("exact")
    def test_training_is_bit_identical_to_one_process(self, layout: RunLayout) -> None:
        self.compare(layout, EXACT, 0)

    @mark_capability("exact")
    def test_evaluation_is_bit_identical_to_one_process(self, layout: RunLayout) -> None:
        """Check that evaluation sums losses in sample order, bit-identically on any number of ranks."""
        self.compare(layout, EXACT_EVALUATION, 0)

    @mark_capability("exact tied")
    def test_training_with_tied_weights_is_bit_identical(self, layout: RunLayout) -> None:
        self.compare(layout, EXACT_TIED, 0)

    # --- folds and emitted values ------------------------------------------------------------------------------------

    @mark_capability(LAYOUT)
    def test_module_on_a_fold_matches_one_process(self, layout: RunLayout) -> None:
        """Check that gradients of a module on a fold are summed over the ranks of `fold_rest` only."""
        self.compare(layout, LANES, FLOAT64)

    @mark_capability(LAYOUT)
    def test_emitted_metrics_match_one_process(self, layout: RunLayout) -> None:
        """Check that emitted sums, means, maxima and losses count each token once and are equal on all ranks."""
        for scenario in (LANES, RECOMPUTED):
            job = self.make_job(layout, scenario)
            got = self.train_job(job)
            steps = self.train_reference(job, got[0].coordinate[1])[1]
            for of_rank in got:
                for one, want in zip(of_rank.steps, steps, strict=True):
                    missing = sorted(set(want.metrics) - set(one.metrics))  # a strategy may report more
                    assert not missing, f"the step result lacks metrics that modules emitted: {', '.join(missing)}"
                    for name, value in want.metrics.items():
                        metric = torch.tensor(one.metrics[name], dtype=torch.float64)
                        close(f"metric {name}", metric, torch.tensor(value, dtype=torch.float64), FLOAT64)

    @mark_capability(LAYOUT)
    def test_emitted_losses_add_to_the_gradients(self, layout: RunLayout) -> None:
        """Check that gradients, but not the reported loss, include emitted losses: (loss + emitted losses) / tokens."""
        job = self.make_job(layout, LANES)
        got = self.train_job(job)
        want = self.train_reference(job, got[0].coordinate[1])[1][0]
        assert_number_close("loss without emitted losses", got[0].steps[0].loss_sum, want.loss_sum, FLOAT64)
        gradients = self.assemble_shards([of_rank.steps[0].held for of_rank in got], want.gradients)
        compare_all("gradient", gradients, want.gradients, FLOAT64)

    @mark_capability(LAYOUT)
    def test_after_step_gets_values_reduced_over_all_ranks(self, layout: RunLayout) -> None:
        """Check that `after_step` of a module gets values reduced over all ranks, and its buffer is in `shards`."""
        job = self.make_job(layout, LANES)
        got = self.train_job(job)
        last = self.train_reference(job, got[0].coordinate[1])[2]
        arrays = self.assemble_shards([of_rank.last for of_rank in got], last)
        buffers = [name for name in last if name.endswith(".balance")]
        assert buffers
        for name in buffers:
            assert bool(last[name].any()), "`after_step` did not change the buffer of the toy module"
            close(name, arrays[name], last[name], FLOAT64)
