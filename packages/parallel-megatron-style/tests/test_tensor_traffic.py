"""Collectives, activation bytes and FLOPs of tensor parallelism, against arXiv 1909.08053 and 2205.05198."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tensor_ranks import LENGTH, ROWS, Case, batch_of, cut_model, tp, whole_of

from gangline.comm.wrap import Wrapped
from gangline.config.sections import Recompute
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.tensor.region import Region
from gangline_parallel_megatron_style.tensor.setting import Setting
from gangline_testkit.pool import get_pool

HIDDEN = ROWS * LENGTH * 32 * 8  # bytes of the hidden states of all tokens in float64
SUM = ROWS * LENGTH * 2 * 8  # two float64 numbers per row that a rank reports of its logits


class Counting(Wrapped):
    """Communicator that counts calls, and the bytes of the full tensor of each collective."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def _count(self, name: str, nbytes: int) -> None:
        self.calls[name] += 1
        self.bytes[name] += nbytes

    def _all_reduce(self, x, op, background):
        self._count("all_reduce", x.nbytes)
        return super()._all_reduce(x, op, background)

    def _all_gather(self, x, into, background):
        self._count("all_gather", x.nbytes * self.size)
        return super()._all_gather(x, into, background)

    def _reduce_scatter(self, x, background):
        self._count("reduce_scatter", x.nbytes)
        return super()._reduce_scatter(x, background)

    def since(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the calls and bytes since the previous call of this method."""
        found = dict(self.calls), dict(self.bytes)
        self.calls.clear()
        self.bytes.clear()
        return found


def counted(case: Case):
    comm = Counting(tp())
    model, _ = cut_model(case, comm)
    loss = model(batch_of(case))
    forward = comm.since()
    loss.backward()
    return forward, comm.since()


@pytest.mark.parametrize("layers", [1, 3])
def test_each_layer_and_pass_needs_two_all_reduces(layers):
    """Check one more all-reduce for the embedding (forward) and the head (backward).

    The forward pass of the head gathers two numbers per row.
    """
    for forward, backward in get_pool(2).run(counted, Case(layers=layers, kv_heads=2)):
        sums = 2 * layers + 1
        assert forward == ({"all_reduce": sums, "all_gather": 1}, {"all_reduce": sums * HIDDEN, "all_gather": 2 * SUM})
        assert backward == ({"all_reduce": sums}, {"all_reduce": sums * HIDDEN})


@pytest.mark.parametrize("layers", [1, 3])
def test_sequence_parallel_collectives_match_closed_form(layers):
    """Check a reduce-scatter and an all-gather for each all-reduce, which cost as much together.

    The backward pass gathers the input of each region again, for the weight gradients.
    """
    for forward, backward in get_pool(2).run(counted, Case(layers=layers, kv_heads=2, sequence_parallel=True)):
        scatters = gathers = 2 * layers + 1
        assert forward[0] == {"reduce_scatter": scatters, "all_gather": gathers + 1}
        assert forward[1] == {"reduce_scatter": scatters * HIDDEN, "all_gather": gathers * HIDDEN + 2 * SUM}
        again = 2 * layers + 1
        assert backward[0] == {"reduce_scatter": scatters, "all_gather": gathers + again}
        assert backward[1] == {"reduce_scatter": scatters * HIDDEN, "all_gather": (gathers + again) * HIDDEN}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_recompute_skips_the_last_collective(sequence_parallel):
    """Check one more sum per layer, not two: recomputation stops once the last matmul has saved its input."""
    case = Case(layers=3, kv_heads=2, sequence_parallel=sequence_parallel)
    for (kept, _), (again, _) in zip(
        (backward for _, backward in get_pool(2).run(counted, case)),
        (backward for _, backward in get_pool(2).run(counted, replace(case, recompute=Recompute.full))),
        strict=True,
    ):
        sums = "reduce_scatter" if sequence_parallel else "all_reduce"
        assert again[sums] == kept[sums] + 3
        assert again.get("all_gather", 0) == kept.get("all_gather", 0) + (6 if sequence_parallel else 0)


def kept_bytes(case: Case, cut: bool) -> int:
    """Return the bytes that the forward pass of a block saves, without weights.

    cut: the block is sharded over tp
    """
    model, _ = cut_model(case, tp()) if cut else whole_of(case)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shape = (LENGTH // (tp().size if case.sequence_parallel else 1), ROWS, 32)
    hidden = torch.randn(shape, dtype=case.dtype).transpose(0, 1).requires_grad_()
    found: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            found[x.untyped_storage().data_ptr()] = x
        return x

    batch = batch_of(case)
    model.blocks[0](hidden, batch)  # computes the rotary angles that all layers share
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.blocks[1](hidden, batch)
    del out
    return sum(x.untyped_storage().nbytes() for x in found.values())


@pytest.mark.parametrize("world", [2, 4])
def test_activation_bytes_shrink_with_tp_ranks(world):
    """Check all activations with sequence parallelism, those inside regions without; angles stay unsharded."""
    numbers = ROWS * LENGTH * 8
    (whole,) = get_pool(1).run(kept_bytes, Case(), False)
    angles = 2 * 4 * numbers
    inside = (4 * 32 + 4 + 4 * 48) * numbers  # q, k, v, out and its log-sum-exp; gate, silu(gate), up, their product
    for kept in get_pool(world).run(kept_bytes, Case(), True):
        assert kept <= whole - inside * (world - 1) // world
    for kept in get_pool(world).run(kept_bytes, Case(sequence_parallel=True), True):
        assert kept <= angles + (whole - angles) // world


def kept_open(sequence_parallel: bool) -> list[bool]:
    """Return whether a region's input is alive after the first of two column matmuls, and after its last use.

    The last use is the second matmul, a matmul of another tensor, or the row matmul.
    """
    region = Region(Setting(tp(), Plain(torch.float64, torch.float64), sequence_parallel), columns=2)
    w, a = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    seen: list[bool] = []

    def look(kept: weakref.ref) -> None:
        gc.collect()
        seen.append(kept() is not None)

    with torch.no_grad():
        for last in (
            region.multiply_colwise,
            lambda x, w: region.multiply_colwise(x.clone(), w),
            lambda x, w: region.multiply_rowwise(x @ w.t(), a),
        ):
            x = torch.randn(2, 4, 4, dtype=torch.float64)
            region.multiply_colwise(x, w)
            kept = weakref.ref(region._open[3])
            look(kept)
            last(x, w)
            look(kept)
    return seen


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_region_input_is_freed_after_last_use(sequence_parallel):
    for seen in get_pool(2).run(kept_open, sequence_parallel):
        assert seen == [True, False] * 3
