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

HIDDEN = ROWS * LENGTH * 32 * 8  # bytes of one hidden state of all tokens, float64
SUM = ROWS * LENGTH * 2 * 8  # what a rank says of its logits


class Counting(Wrapped):
    """Bytes of the whole tensor of every collective, and how often each was called."""

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
        """Calls and bytes since the last time."""
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
    """And one for the embedding forward, one for the head backward, whose forward gathers two numbers a row."""
    for forward, backward in get_pool(2).run(counted, Case(layers=layers, kv_heads=2)):
        sums = 2 * layers + 1
        assert forward == ({"all_reduce": sums, "all_gather": 1}, {"all_reduce": sums * HIDDEN, "all_gather": 2 * SUM})
        assert backward == ({"all_reduce": sums}, {"all_reduce": sums * HIDDEN})


@pytest.mark.parametrize("layers", [1, 3])
def test_sequence_parallel_collectives_match_closed_form(layers):
    """An all-reduce costs as much as one of each. The gathers again are for the weights of what enters a region."""
    for forward, backward in get_pool(2).run(counted, Case(layers=layers, kv_heads=2, sequence_parallel=True)):
        scatters = gathers = 2 * layers + 1
        assert forward[0] == {"reduce_scatter": scatters, "all_gather": gathers + 1}
        assert forward[1] == {"reduce_scatter": scatters * HIDDEN, "all_gather": gathers * HIDDEN + 2 * SUM}
        again = 2 * layers + 1
        assert backward[0] == {"reduce_scatter": scatters, "all_gather": gathers + again}
        assert backward[1] == {"reduce_scatter": scatters * HIDDEN, "all_gather": (gathers + again) * HIDDEN}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_recompute_skips_the_last_collective(sequence_parallel):
    """One sum more a layer, not two: when the last matmul has kept its input all is there."""
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
    """Bytes that the forward pass of a block keeps, weights left out; `cut` False: of core's own block."""
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
    model.blocks[0](hidden, batch)  # angles are kept for all layers
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.blocks[1](hidden, batch)
    del out
    return sum(x.untyped_storage().nbytes() for x in found.values())


@pytest.mark.parametrize("world", [2, 4])
def test_activation_bytes_shrink_with_tp_ranks(world):
    """Under sequence parallelism all activations, without it those in the regions; only rotary angles stay whole."""
    numbers = ROWS * LENGTH * 8
    (whole,) = get_pool(1).run(kept_bytes, Case(), False)
    angles = 2 * 4 * numbers
    inside = (4 * 32 + 4 + 4 * 48) * numbers  # q, k, v, out and its log-sum-exp; gate, silu(gate), up, their product
    for kept in get_pool(world).run(kept_bytes, Case(), True):
        assert kept <= whole - inside * (world - 1) // world
    for kept in get_pool(world).run(kept_bytes, Case(sequence_parallel=True), True):
        assert kept <= angles + (whole - angles) // world


def kept_open(sequence_parallel: bool) -> list[bool]:
    """Whether what a region entered with is alive after one matmul of two; then after both, another x, or leaving."""
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
