"""Tensor and sequence parallelism: loss and gradients of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensor_ranks import (
    Case,
    Found,
    assembled,
    batch_of,
    cut_model,
    difference,
    gradients_of,
    one_process,
    one_rank,
    tp,
)

from gangline.config.sections import Recompute
from gangline.mesh import Mesh
from gangline_basics.model.seams import get_calls
from gangline_parallel_megatron_style.context.apply import ORDERS, set_attention
from gangline_parallel_megatron_style.context.cut import cut_batch
from gangline_parallel_megatron_style.pipeline.weight_grad_store import WeightGradStore
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

SHAPES = {
    "plain": {},
    "tied": {"tied": True},
    "grouped": {"kv_heads": 2, "qk_norm": True},
    "one key head": {"kv_heads": 1},
    "bias": {"bias": True, "kv_heads": 2},
    "an empty part of the vocabulary": {"vocab_size": 5, "tied": True},
    "whole embedding": {"whole": ("embed.weight",)},
    "whole head": {"whole": ("head.weight",)},
    "whole vocabulary, tied": {"whole": ("embed.weight", "head.weight"), "tied": True},
}


def agree(case: Case, world: int, bound: float) -> None:
    reference = one_process(case)
    ranks = get_pool(world).run(one_rank, case)
    for one in ranks:
        for loss, first, wanted in zip(one.losses, ranks[0].losses, reference.losses, strict=True):
            assert loss.equal(first)
            assert abs(loss.item() - wanted.item()) <= bound * abs(wanted.item())
    for name, gradient in assembled(case, ranks, reference).items():
        assert difference(gradient, reference.gradients[name]) < bound, name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("shape", SHAPES)
def test_float64_matches_one_process(world, sequence_parallel, shape):
    agree(Case(sequence_parallel=sequence_parallel, **SHAPES[shape]), world, 1e-12)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_float32_matches_one_process(world, sequence_parallel):
    agree(Case(torch.float32, sequence_parallel, kv_heads=2), world, 1e-5)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_bfloat16_rounds_as_one_process_does(world, sequence_parallel):
    """Bound the error against float64 by twice the error of one process in bfloat16 plus one rounding per rank."""
    case = Case(torch.bfloat16, sequence_parallel, kv_heads=2)
    exact, rounded = one_process(replace(case, dtype=torch.float64)), one_process(case)
    found = assembled(case, ranks := get_pool(world).run(one_rank, case), rounded)
    for name, gradient in found.items():
        own = difference(rounded.gradients[name], exact.gradients[name])
        assert difference(gradient, exact.gradients[name]) < 2 * own + world * 2**-8, name
    assert abs(ranks[0].losses[0].item() / exact.losses[0].item() - 1) < 2**-7


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.full], ids=lambda r: r.value)
def test_recomputation_changes_no_bit(sequence_parallel, recompute):
    case = Case(sequence_parallel=sequence_parallel, kv_heads=2)
    kept, again = (get_pool(2).run(one_rank, replace(case, recompute=r)) for r in (Recompute.none, recompute))
    for one, other in zip(kept, again, strict=True):
        assert one.losses[0].equal(other.losses[0])
        assert all(one.gradients[name].equal(other.gradients[name]) for name in one.gradients)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full], ids=lambda r: r.value)
def test_microbatches_in_flight_match_one_process(sequence_parallel, recompute):
    """Run three forward passes, then three backward passes, as in a pipeline."""
    case = Case(sequence_parallel=sequence_parallel, recompute=recompute, microbatches=3, tied=True)
    agree(case, 2, 1e-12)


def evaluated(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    model, _ = cut_model(case, tp())
    with torch.no_grad():
        silent = model(batch_of(case))
    return silent, model(batch_of(case)).detach()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_no_grad_loss_is_bit_identical(sequence_parallel):
    for silent, loss in get_pool(2).run(evaluated, Case(sequence_parallel=sequence_parallel)):
        assert silent.equal(loss)
        assert not silent.requires_grad


def deferred(case: Case) -> tuple[list[str], int, dict[str, torch.Tensor]]:
    """Run a backward pass under an open store.

    Return (parameters with a gradient after the backward pass, number of deferred closures, gradients after the
    closures ran).
    """
    model, _ = cut_model(case, tp())
    store = WeightGradStore()
    with store.open(0, 0):
        (model(batch_of(case)) * 0.125).backward()
    early, kept = [name for name, p in model.named_parameters() if p.grad is not None], len(store)
    store.run(0, 0)
    return early, kept, gradients_of(model)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_deferred_weight_gradients_are_bit_identical(sequence_parallel):
    """Check that all sharded weights are deferred: two columns and two rows per layer, the lookup and the head."""
    case = Case(sequence_parallel=sequence_parallel)
    at_once = get_pool(2).run(one_rank, case)
    for (early, kept, gradients), one in zip(get_pool(2).run(deferred, case), at_once, strict=True):
        assert all("norm" in name for name in early)
        assert kept == 4 * case.layers + 2
        assert all(gradients[name].equal(one.gradients[name]) for name in one.gradients)


def with_context(case: Case, method: str) -> Found:
    """Train on one of 2 x 2 ranks, with tp inside cp, and return the loss of the rank's tokens and the gradients."""
    comms = rank.make_comms(Mesh.of({"cp": 2, "tp": 2}))
    cp = comms.get_comm("cp")
    model, plan = cut_model(case, comms.get_comm("tp"))
    set_attention(model, plan, cp, method, get_calls(case.built()[0], plan, "attention"))
    loss = model(cut_batch(batch_of(case), cp.index, cp.size, ORDERS[method]))
    (loss * 0.125).backward()
    return Found([loss.detach()], gradients_of(model))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_tp_with_cp_matches_one_process(sequence_parallel, method):
    """Check that the gradients of the two tp groups add up, because each group has its own tokens."""
    case = Case(sequence_parallel=sequence_parallel, kv_heads=2)
    reference = one_process(case)
    ranks = get_pool(4).run(with_context, case, method)
    total = ranks[0].losses[0] + ranks[2].losses[0]
    assert total.item() == pytest.approx(reference.losses[0].item(), rel=1e-12)
    halves = [assembled(case, ranks[first : first + 2], reference) for first in (0, 2)]
    for name, wanted in reference.gradients.items():
        assert difference(halves[0][name] + halves[1][name], wanted) < 1e-12, name
