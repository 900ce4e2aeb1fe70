"""`optimizer=soap`: comparison with the reference algorithm on bases that rounding does not decide."""

from __future__ import annotations

import pytest
import torch

from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline_basics.checkpoint.weights import find_weights_under
from gangline_basics.optimizer.config import Soap
from gangline_basics.optimizer.soap import SoapMatrix
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session

CPU = torch.device("cpu")


def by_hand(weight, gradients, rates, config):
    """Return the weight after Algorithm 3 of the paper, with an unrotated mean and the bases of `soap`'s docstring."""
    one, two = config.betas
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    sides = [torch.zeros(n, n, dtype=weight.dtype) for n in weight.shape]
    bases = [torch.eye(n, dtype=weight.dtype) for n in weight.shape]

    def refresh():
        for index, (side, basis) in enumerate(zip(sides, bases, strict=True)):
            if len(side) <= config.max_precond_dim:
                shift = config.damping * side.trace() / len(side) + config.eps**2
                damped = side + shift * torch.eye(len(side), dtype=side.dtype)
                columns = []
                for column in (damped @ basis).T:  # Gram-Schmidt, twice
                    for _ in range(2):
                        column = column - sum((other @ column) * other for other in columns)
                    columns.append(column / column.norm())
                bases[index] = torch.stack(columns, 1)

    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        if step:
            mean = one * mean + (1 - one) * gradient
            turned = bases[0].T @ gradient @ bases[1]
            square = two * square + (1 - two) * turned**2
            size = (square / (1 - two**step)).sqrt() + config.eps
            weight = weight - rate * bases[0] @ ((bases[0].T @ mean @ bases[1]) / (1 - one**step) / size) @ bases[1].T
        beta = config.shampoo_beta
        sides = [beta * side + (1 - beta) * x @ x.T for side, x in zip(sides, (gradient, gradient.T), strict=True)]
        for _ in range(8 if step == 0 else step % config.precondition_frequency == 0):
            refresh()
    return weight


def test_rounding_in_first_gradient_does_not_persist():
    """Check a gradient near 0, as of a router gate in the first step: layouts round it differently."""
    kept = [SoapMatrix((12, 20), Soap(), torch.float64, CPU) for _ in range(2)]
    for one in kept:
        one.update(1e-18 * torch.randn(12, 20, dtype=torch.float64), 1)
    for step in range(2, 30):
        gradient = torch.randn(12, 20, dtype=torch.float64)
        one, other = (matrix.update(gradient, step) for matrix in kept)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (8, 8)])
@pytest.mark.parametrize(
    "settings", [{}, {"max_precond_dim": 15, "betas": (0.8, 0.9), "shampoo_beta": 0.7}, {"max_precond_dim": 4}]
)
def test_soap_matches_reference_algorithm(settings, shape):
    """Check also matrices of which one side or both sides are too long for a basis."""
    config = Soap(precondition_frequency=2, **settings)
    weight = torch.randn(shape, dtype=torch.float64)
    gradients, rates = [torch.randn_like(weight) for _ in range(9)], [1e-2 / (step + 1) for step in range(9)]
    want = by_hand(weight, gradients, rates, config)
    kept = SoapMatrix(shape, config, torch.float64, CPU)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        weight = weight - rate * kept.update(gradient, step + 1)
    torch.testing.assert_close(weight, want, rtol=1e-10, atol=1e-11)


def test_bases_of_rank_deficient_gradient_tolerate_rounding():
    """Check a gradient of fewer tokens than rows: the basis of the null space must not depend on rounding."""
    gradient = torch.randn(24, 3, dtype=torch.float64) @ torch.randn(3, 40, dtype=torch.float64)
    other = gradient * (1 + 1e-15 * torch.randn(24, 40, dtype=torch.float64))
    kept = [SoapMatrix((24, 40), Soap(), torch.float64, CPU) for _ in range(2)]
    for matrix, x in zip(kept, (gradient, other), strict=True):
        matrix.update(x, 1)
    for side in ("left", "right"):
        one, two = (getattr(matrix, side).basis for matrix in kept)
        torch.testing.assert_close(one.T @ one, torch.eye(len(one), dtype=torch.float64))
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10)
        mean = getattr(kept[0], side).mean
        own = (one.T @ mean @ one).diagonal()  # nonzero eigenvalues come first
        torch.testing.assert_close(own[:3].sum(), mean.trace(), rtol=1e-3, atol=0)


def held(path, *words):
    """Return (bytes of optimizer state on this rank, bytes that `explain` reports for the fullest rank)."""
    started = open_session(path, "optimizer=soap", "optimizer.max_precond_dim=30", "model.layers=1", *words)
    run = started.run
    said = run.parallel.explain(run, Mesh.of(dict(started.mesh.sizes)))
    held = sum(shard.local.numel() * shard.local.itemsize for shard in started.optimizer.shards())
    return held, said.ranks[0].bytes["optimizer state"]


@pytest.mark.parametrize("world", [1, 2])
def test_explain_reports_bytes_of_fullest_rank(tmp_path, world):
    words = ("parallel=ddp",) if world > 1 else ()
    ranks = get_pool(world).run(held, tmp_path / "run", *words)
    assert {said for _, said in ranks} == {max(held for held, _ in ranks)}
    if world > 1:
        assert ranks[0][0] != ranks[1][0]


def test_state_of_stacked_matrix_is_not_a_weight():
    """Check arrays `optimizer/<state>/<stack>.<number>` of SOAP: averages without the stack are incomplete."""
    names, average = ["embed.weight", "blocks.0.experts.w_up"], "callback/ema/0.9"
    state = [f"optimizer/{state}/blocks.0.experts.w_up.{n}" for state in ("exp_avg", "left_basis") for n in (0, 1)]
    stored = [*(f"model/{name}" for name in names), *state, "optimizer/exp_avg/embed.weight", f"{average}/embed.weight"]
    assert find_weights_under("model", stored, names) == {name: f"model/{name}" for name in names}
    with pytest.raises(UserError, match=r"are incomplete: blocks\.0\.experts\.w_up is missing"):
        find_weights_under(average, stored, names)
    whole = find_weights_under(average, [*stored, f"{average}/{names[1]}"], names)
    assert whole == {name: f"{average}/{name}" for name in names}
