"""Conformance suite for model edits: purity, claimed paths, plans, and training against one process in each layout."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, ClassVar

import pytest
import torch

from gangline.batch import Batch
from gangline.config.schema import Run
from gangline.mesh import Mesh
from gangline.model.build import construct
from gangline.model.calls import call_of
from gangline.model.compose import compose_model
from gangline.model.contracts import Bindable, get_seam_function
from gangline.model.flops import count_flops_per_token
from gangline.model.linear import Embedding, Linear
from gangline.model.tree import Node, get_parameter_shapes, iterate_children, iterate_nodes
from gangline.plan import Plan
from gangline_basics.model.low_bit_node import EightBitNode
from gangline_basics.model.seams import get_calls, list_recomputed
from gangline_testkit import strategy_ranks as ranks
from gangline_testkit.claims import LAYOUT, mark_capability
from gangline_testkit.compare import assemble, assert_number_close, close, compare_all
from gangline_testkit.inputs import make_full_batch
from gangline_testkit.pool import get_pool
from gangline_testkit.scenarios import FLOAT64
from gangline_testkit.strategy_ranks import StrategyJob
from gangline_testkit.suite import PartSuite, check_success
from gangline_testkit.toys.plugin import Rows

_TORCH_FREE = """
import hashlib, sys
from gangline.model.compose import compose_model
from gangline_testkit.runs import build_small_run
made = repr(compose_model(build_small_run(*sys.argv[1:])))
assert "torch" not in sys.modules, "torch is imported"
print(hashlib.sha256(made.encode()).hexdigest())
"""


class ModelEditSuite(PartSuite):
    """Conformance suite for model edits; subclass it with ``choice = "GROUP=mine"``. GROUP: a group of model edits.

    model    settings of the edited model; empty: a small decoder
    layouts  numbers of data-parallel ranks to test on
    axes     mesh axes to test, each alone with two ranks
    """

    model: ClassVar[tuple[str, ...]] = ()
    layouts: ClassVar[tuple[int, ...]] = (1, 2, 4)
    axes: ClassVar[tuple[str, ...]] = ("tp", "cp", "pp")
    CLAIMS: ClassVar[dict[str, str]] = {
        LAYOUT: "Edited models in every layout match one process (implied unless `Part.layout_dependent` is set)."
    }

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, values in (("world", self.layouts), ("axis", self.axes)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    def get_model_settings(self) -> tuple[str, ...]:
        return self.model

    def build_config(self, run: Run) -> Any:
        return run.edits[self.group]

    def compose_before(self) -> tuple[Node, Plan]:
        """Return (tree, plan) of the model without the edit."""
        return compose_model(replace(self.run(), edits={}))

    def compose_after(self) -> tuple[Node, Plan, list[str]]:
        """Return (tree, plan, claimed paths) of the edited model."""
        tree, plan = self.compose_before()
        tree, plan, claimed = self.build(tree, plan, self.build_config(self.run()))
        return tree, plan, list(claimed)

    # --- the edit itself ---------------------------------------------------------------------------------------------

    def test_edit_is_pure(self) -> None:
        """Check that the edit does not change its inputs, and returns equal results for equal inputs."""
        tree, plan = self.compose_before()
        options = self.build_config(self.run())
        inputs = copy.deepcopy((tree, plan, options))
        one = self.build(tree, plan, options)
        assert (tree, plan, options) == inputs, "the edit changed its inputs (tree, plan or options)"
        two = self.build(*copy.deepcopy(inputs))
        assert repr(one) == repr(two), "the edit returns another result on the second call with equal inputs"

    def test_edit_is_torch_free_and_equal_in_every_process(self) -> None:
        words = [*self.get_model_settings(), *self.chosen, *self.settings]
        process = subprocess.run(
            [sys.executable, "-c", _TORCH_FREE, *words], capture_output=True, text=True, timeout=120, env=os.environ
        )
        check_success(process)
        here = hashlib.sha256(repr(compose_model(self.run())).encode()).hexdigest()
        assert process.stdout.strip() == here, "the edited model differs in another process with the same settings"

    def test_claims_cover_exactly_the_changed_nodes(self) -> None:
        """Check that the claimed paths are the changed nodes, because core refuses two edits that claim one node."""
        tree, _ = self.compose_before()
        edited, _, claimed = self.compose_after()
        changed_paths = list(_list_changed(tree, edited))
        assert changed_paths or not claimed, f"the edit claims {', '.join(claimed)}, and changes no node"
        for path in changed_paths:
            assert any(_is_within(path, claim) for claim in claimed), (
                f"the node {path or 'root'} is changed and not claimed"
            )
        for claim in claimed:
            assert any(_is_within(path, claim) for path in changed_paths), (
                f"the node {claim} is claimed and not changed"
            )

    # --- plan and modules --------------------------------------------------------------------------------------------

    def test_every_array_has_an_init(self) -> None:
        """Check that the plan has an Init for all parameters (tied: for their owner) and persistent buffers."""
        tree, plan, _ = self.compose_after()
        for name in construct(tree).state_dict():
            plan.init(plan.get_owner(name))

    def test_every_pattern_of_the_plan_matches_an_array(self) -> None:
        tree, plan, _ = self.compose_after()
        unmatched = plan.find_unmatched(construct(tree).state_dict())
        assert not unmatched, f"patterns of the plan that match no parameter or buffer: {', '.join(unmatched)}"

    def test_nodes_state_the_shapes_of_their_modules(self) -> None:
        """Check that nodes state the parameter shapes of their modules, because core counts parameters by the tree."""
        tree, _, _ = self.compose_after()
        shapes = {name: tuple(p.shape) for name, p in construct(tree).named_parameters()}
        assert get_parameter_shapes(tree) == shapes

    def test_plan_and_nodes_state_equal_blocks_of_codes(self) -> None:
        """Check that plan (for initial codes) and node (for the matmul) state equal block sizes of 8-bit codes."""
        tree, plan, _ = self.compose_after()
        blocks = {f"{path}.weight": node.block for path, node in iterate_nodes(tree) if isinstance(node, EightBitNode)}
        for name in get_parameter_shapes(tree):
            rule = plan.find_low_bit(name)
            if plan.is_scales(name) or plan.get_owner(name) != name:
                continue
            block = rule.block if rule is not None else 0
            assert block == blocks.get(name, 0), (
                f"{name}: the block size is {block} in the plan and {blocks.get(name, 0)} in its node"
            )

    def test_flops_of_the_edited_model_are_counted(self) -> None:
        tree, plan, _ = self.compose_after()
        assert count_flops_per_token(tree, 128, plan) > 0

    def test_modules_of_sharded_parameters_have_bind(self) -> None:
        """Check that every new parameter that the plan shards is in a module with `bind(axis)`.

        Along tp, core's Linear and Embedding and the matmul of a loss seam need no `bind`: strategies shard them.
        """
        tree, plan, _ = self.compose_after()
        model, losses = construct(tree), get_calls(tree, plan, "loss")
        before = dict(construct(self.compose_before()[0]).named_parameters(remove_duplicate=False))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            axes = set(plan.get_shard_rules(name, parameter.dim()))
            if not axes or name in before:
                continue
            around = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
            modules = [model.get_submodule(path) for path in around]
            own = isinstance(modules[0], Linear | Embedding) or losses.get(around[0]) is not None
            known = own and axes == {"tp"}
            assert known or any(isinstance(module, Bindable) for module in modules), (
                f"the plan shards {name}, and no module around the parameter has `bind`"
            )

    def test_seam_functions_match_the_calls_of_their_nodes(self) -> None:
        """Check that nodes state the calls that their modules compute at seams, because strategies replace them."""
        tree, plan, _ = self.compose_after()
        modules = dict(construct(tree).named_modules())
        for seam in plan.seams:
            for path, call in get_calls(tree, plan, seam.name).items():
                function = get_seam_function(modules[path], seam.name)
                if function is None:
                    continue
                own = call_of(function)
                message = (
                    f"{path}.{seam.name}: the node states {call or 'no call'}, the function computes {own or 'no call'}"
                )
                assert call is not None, message
                assert own == call, message

    # --- results -----------------------------------------------------------------------------------------------------

    def make_job(self, world: int, recompute: bool = False) -> StrategyJob:
        """Return a job of the edited model on `world` data ranks of the toy strategy `rows`, which implements folds."""
        run = replace(self.run("run.deterministic=false"), parallel=Rows())
        tree, plan, _ = self.compose_after()
        build = "gangline_testkit.toys.rows:build"
        return StrategyJob(build, run, tree, plan, Mesh.of({"dp_shard": world}), torch.float64, "ragged", 3, recompute)

    def test_loss_and_gradients_are_finite(self) -> None:
        _, steps, last, _, _ = get_pool(1).run(ranks.expect, self.make_job(1), 1)[0]
        assert all(math.isfinite(step.loss_sum) and step.finite for step in steps)
        assert all(bool(torch.isfinite(array).all()) for array in last.values() if array.is_floating_point())
        for step in steps:
            for name, gradient in step.gradients.items():
                assert bool(torch.isfinite(gradient).all()), (
                    f"the gradient of {name} contains values that are not finite"
                )

    def test_every_parameter_gets_a_gradient(self) -> None:
        """Check that each parameter gets a nonzero gradient in some step: B = 0 (LoRA) delays the gradient of A."""
        steps = get_pool(1).run(ranks.expect, self.make_job(1), 1)[0][1]
        still = [name for name in steps[0].gradients if not any(bool(step.gradients[name].any()) for step in steps)]
        assert not still, f"parameters with zero gradients in all steps: {', '.join(still)}"

    def test_works_as_a_bare_module(self) -> None:
        """Check that the model computes a finite loss outside of a step, as in sampling."""
        assert get_pool(1).run(check_bare, self.make_job(1))[0]

    def test_cached_decoding_matches_a_full_forward(self) -> None:
        """Check that cached decoding has the logits of a full forward pass, if all nodes have `Node.get_decoding`."""
        for logits, anew in get_pool(1).run(generate_texts, self.make_job(1))[0]:
            close("logits of cached decoding", logits, anew, FLOAT64)

    @mark_capability(LAYOUT)
    def test_edited_model_matches_one_process(self, world: int) -> None:
        """Check that losses, gradients, metrics and weights match one process in float64."""
        self.compare(self.make_job(world), FLOAT64)

    @mark_capability(LAYOUT)
    def test_recomputed_edited_model_matches_one_process(self, world: int) -> None:
        self.compare(self.make_job(world, recompute=True), FLOAT64)

    @mark_capability(LAYOUT)
    def test_tp_cp_and_pp_match_one_rank(self, axis: str) -> None:
        """Check that two ranks of tp (heads, features), cp (tokens) or pp (blocks) match one; folds have size 1."""
        job = self.make_job(1)
        plan = replace(job.plan, folds=tuple(replace(fold, out_of=("dp_shard",)) for fold in job.plan.folds))
        self.compare(replace(job, plan=plan, mesh=Mesh.of({axis: 2})), FLOAT64)

    def compare(self, job: StrategyJob, relative: float) -> None:
        got = get_pool(job.mesh.world).run(ranks.train, job)
        _, steps, last, evaluated, _ = get_pool(1).run(ranks.expect, job, got[0].coordinate[1])[0]
        for number, want in enumerate(steps):
            one = got[0].steps[number]
            assert_number_close(f"loss of step {number}", one.loss_sum, want.loss_sum, relative)
            shapes = {name: tuple(gradient.shape) for name, gradient in want.gradients.items()}
            gradients = assemble([of_rank.steps[number].held for of_rank in got], shapes)
            compare_all(f"step {number}: gradient", gradients, want.gradients, relative)
            assert set(want.metrics) <= set(one.metrics)
            for name, value in want.metrics.items():
                close(
                    f"metric {name}", torch.tensor(one.metrics[name]).double(), torch.tensor(value).double(), relative
                )
        shapes = {name: tuple(array.shape) for name, array in last.items()}
        compare_all("final array", assemble([of_rank.last for of_rank in got], shapes), last, relative)
        assert_number_close("evaluated loss", got[0].evaluated[0], evaluated[0], relative)


def check_bare(job: StrategyJob) -> bool:
    """Return whether the loss of a microbatch is finite outside of any `forward_context.frame`."""
    from gangline_testkit.reference import Reference

    reference = Reference(job.tree, job.plan, seed=job.run.seed, dtype=job.dtype)
    with torch.no_grad():
        loss = reference.compute_loss(job.share(0, 0, 1)[-1])
    return bool(torch.isfinite(loss))


@torch.no_grad()
def generate_texts(job: StrategyJob) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each prompt the logits (tokens, V) of cached decoding, and of one forward pass over the full text.

    Returns [] if a node does not support cached decoding.
    """
    from gangline.comm.solo import Solo
    from gangline.model.init import make_whole_model
    from gangline.runtime import Sampling
    from gangline_basics.parallel.prepare import bind_folds
    from gangline_basics.sampling.decode import decode

    if list_recomputed(job.tree):
        return []
    model: Any = make_whole_model(job.tree, job.plan, seed=job.run.seed, dtype=job.dtype).eval()
    bind_folds(model, job.plan, Solo)
    steps: list[torch.Tensor] = []

    def forward(batch: Batch) -> torch.Tensor:
        steps.append(model.head.compute_logits(model.hidden(batch)[:, -1:])[:, -1])
        return steps[-1]

    prompts = [[token % job.vocab_size for token in row] for row in ((3, 1, 4), (1,), (5, 9, 2, 6))]
    how = Sampling(tokens=job.run.batch.sequence_length - 4, temperature=1.0, seed=job.run.seed)
    texts = decode(forward, prompts, how, cached=True, device=torch.device("cpu"))
    logits = []
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone = make_full_batch(torch.tensor([prompt + text.tokens[:-1]]))
        logits.append((torch.stack([step[row] for step in steps]), model.compute_logits(alone)[0, len(prompt) - 1 :]))
    return logits


def _is_within(path: str, claim: str) -> bool:
    return path == claim or path.startswith(claim + ".") or claim == ""


def _list_changed(before: Node, after: Node, path: str = "") -> Iterator[str]:
    """Yield the paths of the topmost nodes that differ."""
    theirs, ours = dict(iterate_children(before)), dict(iterate_children(after))
    if type(before) is not type(after) or set(theirs) != set(ours) or _read_fields(before) != _read_fields(after):
        yield path
        return
    for name, child in theirs.items():
        yield from _list_changed(child, ours[name], f"{path}.{name}" if path else name)


def _read_fields(node: Node) -> dict[str, Any]:
    """Return the fields of a node without its child nodes."""
    values = {item.name: getattr(node, item.name) for item in fields(node)}
    return {
        name: value
        for name, value in values.items()
        if not isinstance(value, Node) and not (isinstance(value, tuple) and any(isinstance(v, Node) for v in value))
    }
