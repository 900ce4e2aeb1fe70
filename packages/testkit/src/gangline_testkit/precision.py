"""Conformance suite for precisions (hook `gangline_precisions`): matmuls against float64, loss scale, short runs."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from gangline.config.schema import Run
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.plugin.registry import load
from gangline.precision import Precision
from gangline_testkit import strategy_ranks as ranks
from gangline_testkit.claims import mark_capability
from gangline_testkit.compare import assemble
from gangline_testkit.pool import get_pool
from gangline_testkit.strategy_ranks import StrategyJob
from gangline_testkit.suite import PartSuite

STEPS = 4
OUTCOMES = [
    False,
    False,
    True,
    False,
    True,
    True,
    False,
    False,
    False,
    True,
]  # whether each step was not finite, for `Precision.update`


def _multiply(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return x Wᵀ + b in float64."""
    return x.double() @ w.double().T + (0 if b is None else b.double())


def train_job(build: str, job: StrategyJob) -> tuple[list[float], list[dict[str, Tensor]], list[str]]:
    """Train in one process in the tested precision, and return (losses, gradients, dtypes of the master weights)."""
    precision: Precision = load(build)(job.run.precision, job.run)
    runtime = ranks.start_rows(job, precision)
    losses, gradients = [], []
    velocities: dict[int, torch.Tensor] = {}
    for step in range(STEPS):
        stepped = ranks.run_step(runtime, job.share(step, 0, 1))
        for _ in range(40):  # repeats the step until the loss scale is low enough for finite gradients
            if stepped.finite or not job.run.precision.finds_scale:
                break
            precision.update(True)
            stepped = ranks.run_step(runtime, job.share(step, 0, 1))
        assert stepped.finite
        losses.append(stepped.loss_sum)
        shapes = {parameter.name: parameter.shape for parameter in runtime.parameters()}
        gradients.append(assemble([stepped.held], shapes))
        ranks.apply(runtime, velocities)
        precision.update(False)
    dtypes = [str(piece.tensor.dtype) for parameter in runtime.parameters() for piece in parameter.pieces]
    return losses, gradients, sorted(set(dtypes))


class PrecisionSuite(PartSuite):
    """Conformance suite for precisions; subclass it with ``choice = "precision=mine"``.

    tolerance  maximum error of a matmul, relative to the norm of the float64 result, without the claim "faithful"
    """

    tolerance: ClassVar[float] = 0.06
    CLAIMS: ClassVar[dict[str, str]] = {
        "faithful": "Matmuls are within 8 units in the last place of the compute dtype.",
        "scale": "The precision lowers its loss scale after a step that is not finite.",
    }

    def build_precision(self, run: Run | None = None) -> Precision:
        run = run or self.run()
        return self.build(run.precision, run)

    def compute_tolerance(self, precision: Precision) -> float:
        return 8 * torch.finfo(precision.compute_dtype).eps if "faithful" in self.can else self.tolerance

    def make_inputs(self, precision: Precision, *lead: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random x (*lead, 24), w (16, 24) and b (16,) in the compute dtype, as a strategy passes them."""
        draws = torch.Generator().manual_seed(5)
        x, w, b = (torch.randn(shape, generator=draws) for shape in ((*lead, 24), (16, 24), (16,)))
        return tuple(t.to(precision.compute_dtype).requires_grad_() for t in (x, w * 0.2, b))  # type: ignore[return-value]

    def check_near(self, what: str, got: Tensor, want: Tensor, relative: float) -> None:
        """Assert that the distance of `got` from `want` is at most `relative` times the norm of `want`."""
        apart = float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())
        assert apart <= relative, f"{what} differs from float64 by {apart:.3g} of its norm; {relative:.3g} is allowed"

    # --- dtypes and matmuls ------------------------------------------------------------------------------------------

    def test_master_weights_have_at_least_float32(self) -> None:
        """Check that master weights, which checkpoints store, and gradients have at least float32."""
        precision = self.build_precision()
        for name in ("param_dtype", "compute_dtype", "reduce_dtype", "grad_dtype"):
            assert getattr(precision, name).is_floating_point, (
                f"{name} must be a floating-point dtype, and is {getattr(precision, name)}"
            )
        assert precision.param_dtype.itemsize >= 4
        assert precision.grad_dtype.itemsize >= 4

    @pytest.mark.parametrize("lead", [(5,), (2, 3), (1, 1, 7)], ids=str)
    @pytest.mark.parametrize("biased", [False, True])
    def test_linear_matches_a_float64_matmul(self, lead: tuple[int, ...], biased: bool) -> None:
        precision = self.build_precision()
        x, w, b = self.make_inputs(precision, *lead)
        y = precision.linear(x, w, b if biased else None)
        assert y.shape == (*lead, 16)
        assert y.is_floating_point()
        self.check_near("x Wᵀ + b", y, _multiply(x, w, b if biased else None), self.compute_tolerance(precision))

    @mark_capability("faithful")
    def test_linear_is_as_exact_as_the_compute_dtype(self) -> None:
        precision = self.build_precision()
        x, w, b = self.make_inputs(precision, 64)
        exact = 8 * torch.finfo(precision.compute_dtype).eps
        self.check_near("x Wᵀ + b", precision.linear(x, w, b), _multiply(x, w, b), exact)

    def test_linear_gradients_match_a_float64_matmul(self) -> None:
        precision = self.build_precision()
        x, w, b = self.make_inputs(precision, 4, 6)
        y = precision.linear(x, w, b)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(y.dtype)
        got = torch.autograd.grad(y, (x, w, b), upstream)
        exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
        y_exact = exact[0] @ exact[1].T + exact[2]
        want = torch.autograd.grad(y_exact, exact, upstream.double())
        for name, gradient, theirs in zip(("x", "w", "b"), got, want, strict=True):
            self.check_near(f"gradient of {name}", gradient, theirs, 2 * self.compute_tolerance(precision))

    def test_linear_works_without_tokens(self) -> None:
        """Check that `linear` accepts an input without rows, as on a rank without tokens, with zero gradients."""
        precision = self.build_precision()
        x, w, b = self.make_inputs(precision, 0)
        y = precision.linear(x, w, b)
        assert y.shape == (0, 16)
        (gradient,) = torch.autograd.grad(y.sum(), w)
        assert not bool(gradient.any())

    def test_linear_does_not_change_its_inputs(self) -> None:
        precision = self.build_precision()
        x, w, b = self.make_inputs(precision, 4)
        before = [t.detach().clone() for t in (x, w, b)]
        precision.linear(x, w, b).float().sum().backward()
        assert all(torch.equal(t.detach(), was) for t, was in zip((x, w, b), before, strict=True))

    def test_linear_is_repeatable(self) -> None:
        precision = self.build_precision()
        x, w, b = self.make_inputs(precision, 3, 5)
        assert torch.equal(precision.linear(x, w, b), precision.linear(x, w, b))

    # --- the loss scale ----------------------------------------------------------------------------------------------

    def test_scale_stays_1_without_loss_scaling(self) -> None:
        precision = self.build_precision()
        if "scale" not in self.can:
            assert not self.run().precision.finds_scale, (
                'PrecisionConfig.finds_scale is true, and the claim "scale" is missing in `can`'
            )
            for outcome in OUTCOMES:
                assert precision.scale == 1.0
                precision.update(outcome)

    @mark_capability("scale")
    def test_scale_falls_after_steps_that_are_not_finite(self) -> None:
        precision = self.build_precision()
        assert self.run().precision.finds_scale, 'the claim "scale" needs PrecisionConfig.finds_scale = True'
        first = precision.scale
        precision.update(True)
        assert 0 < precision.scale < first
        for _ in range(200):
            precision.update(True)
        assert precision.scale > 0, "the loss scale is 0 after 200 steps that are not finite"
        low = precision.scale
        for _ in range(5):
            precision.update(False)
        assert precision.scale >= low

    def test_precision_restored_from_state_has_equal_scales(self) -> None:
        """Check that a precision restored from its state after any step has the same loss scales as the original."""
        for place in range(len(OUTCOMES)):
            one, two = self.build_precision(), self.build_precision()
            for outcome in OUTCOMES[:place]:
                one.update(outcome)
            two.load_state(json.loads(json.dumps(one.state())))
            for outcome in OUTCOMES[place:]:
                assert one.scale == two.scale, f"the restored precision has another loss scale (state of step {place})"
                one.update(outcome)
                two.update(outcome)
            assert one.scale == two.scale

    # --- training ----------------------------------------------------------------------------------------------------

    def train_both(self) -> tuple[Any, Any]:
        """Train a small model in this precision, and the reference in the master dtype (float32 or float64)."""
        run = self.run("run.deterministic=true")
        tree, plan = compose_model(run)
        master = self.build_precision(run).param_dtype
        job = StrategyJob(self.offer.part.build, run, tree, plan, Mesh.of({}), master, "ragged", STEPS)
        return get_pool(1).run(train_job, self.offer.part.build, job)[0], get_pool(1).run(ranks.expect, job, 1)[0][1]

    def test_training_stays_near_the_master_dtype(self) -> None:
        """Check that losses and unscaled gradients stay near the reference, which computes in the master dtype."""
        (losses, gradients, dtypes), steps = self.train_both()
        precision = self.build_precision()
        assert dtypes == [str(precision.param_dtype)]
        allowed = min(8 * self.compute_tolerance(precision), 0.25)
        for number, want in enumerate(steps):
            apart = abs(losses[number] - want.loss_sum) / want.loss_sum
            assert apart <= allowed, (
                f"the loss of step {number} differs from the master dtype by {apart:.3g}; allowed {allowed:.3g}"
            )
        norm = sum(float(g.double().square().sum()) for g in steps[0].gradients.values()) ** 0.5
        for name, want in steps[0].gradients.items():
            apart = float((gradients[0][name].double() - want.double()).norm()) / norm
            assert apart <= allowed, (
                f"the first gradient of {name} differs by {apart:.3g} of the global norm; allowed {allowed:.3g}"
            )
