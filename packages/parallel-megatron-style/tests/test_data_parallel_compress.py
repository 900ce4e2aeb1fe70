"""Compressed sums: what travels, what is lost, what feedback gives back, and that a model learns all the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from compress_ranks import (
    MODEL,
    bytes_by_axis,
    counted_sum,
    dtypes_on_the_wire,
    first_gradients,
    local_arrays,
    one_sum,
    repeated_sum,
    trained,
)
from hypothesis import given, settings, strategies as st

from gangline.config.defaults import default_run
from gangline.mesh import Mesh
from gangline_parallel_megatron_style.config import ThreeD
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.memory import state
from gangline_parallel_megatron_style.data_parallel.compressed_bytes import CHUNK
from gangline_parallel_megatron_style.data_parallel.grad_codec import Bfloat16, Signs
from gangline_testkit.pool import pool


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 10_000))
def test_signs_keep_each_sign_and_each_chunks_mean(rows, chunks, seed):
    x = torch.randn(rows, chunks * CHUNK, generator=torch.Generator().manual_seed(seed))
    code = Signs().encode(x)
    assert code.shape == (rows, chunks * (4 + CHUNK // 8))
    y = Signs().decode(code, torch.float32)
    assert torch.equal(y >= 0, x >= 0)
    wanted = x.view(rows, chunks, CHUNK).abs().mean(-1, keepdim=True).expand(-1, -1, CHUNK)
    assert torch.equal(y.abs(), wanted.reshape(rows, -1))


def test_bfloat16_is_rounding():
    x = torch.randn(2, 37)
    assert torch.equal(Bfloat16().decode(Bfloat16().encode(x), torch.float32), x.bfloat16().float())


@pytest.mark.parametrize("whole", [True, False])
def test_parts_rounded_to_bfloat16_are_added_in_float32(whole):
    """Added in bfloat16 1 + 3 · 2⁻⁹ would stay 1."""
    parts = [[1.0, 2.0**-9, 2.0**-9, 2.0**-9], [2.0**-9] * 4, [2.0**-9] * 4, [2.0**-9] * 4]
    ranks = pool(4).run(one_sum, "bf16", parts, whole)
    total = torch.tensor(parts).sum(0)
    for index, found in enumerate(ranks):
        assert torch.equal(found, total.bfloat16().float() if whole else total[index : index + 1])
    assert float(total[0]) > float(torch.tensor(1.0).bfloat16())


@pytest.mark.parametrize("whole", [True, False])
def test_with_feedback_what_is_sent_comes_to_what_was_to_be_sent(whole):
    """All sums of a constant gradient differ from the true ones by no more than the errors still kept."""
    sums, errors, true = zip(*pool(2).run(repeated_sum, "onebit", 40, whole), strict=True)
    for rank in range(2):
        assert torch.allclose(sums[rank] + errors[rank], 40 * true[rank], atol=1e-3)
        assert float((sums[rank] / 40 - true[rank]).abs().mean()) < 0.1 * float(true[rank].abs().mean())


@pytest.mark.parametrize(("compress", "bits"), [("bf16", 16), ("onebit", 1 + 32 / CHUNK)])
@pytest.mark.parametrize("whole", [True, False])
def test_bytes_on_the_wire(compress, bits, whole):
    size, n = 64 * CHUNK, 4
    for found in pool(n).run(counted_sum, compress, size, whole):
        each = int(bits * size / n / 8)  # of a range
        assert found == Counter(all_to_all=n * each, **({"all_gather": each} if whole else {}))


STEPS = 100


def test_a_model_learns_as_without_compression():
    """Within 0.15 nats after 100 steps, 90 of them compressed both ways; with signs alone it stays further off."""
    free = trained_loss(0, "none")
    assert free - 0.05 < trained_loss(0, "onebit") < free + 0.15
    assert free - 0.05 < trained_loss(1, "onebit") < free + 0.1  # only on the way to the owner
    assert trained_loss(0, "onebit", broken=True) > free + 0.15


@pytest.mark.nightly  # each sum is known to be rounded and no more
def test_in_bfloat16_a_model_learns_as_without_compression():
    assert trained_loss(0, "bf16") == pytest.approx(trained_loss(0, "none"), abs=0.01)


def trained_loss(zero: int, compress: str, broken: bool = False) -> float:
    losses = pool(2).run(trained, zero, compress, STEPS, broken)
    assert losses[0] == losses[1]
    return losses[0]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_before_compress_after_gradients_travel_as_they_are(zero):
    for plain, before, after in pool(2).run(first_gradients, zero):
        assert all(torch.equal(a, b) for a, b in zip(plain, before, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(plain, after, strict=True))


@pytest.mark.parametrize(
    ("axes", "zero"),
    [
        ({"dp_replicate": 1, "dp_shard": 4}, 0),
        ({"dp_replicate": 1, "dp_shard": 4}, 2),
        ({"dp_replicate": 2, "dp_shard": 2}, 1),
        ({"dp_replicate": 4, "dp_shard": 1}, 0),
    ],
)
def test_errors_are_local_arrays_of_one_layout(axes, zero):
    """Every rank names the same arrays, and holds one row of each."""
    names, held, again = zip(*pool(4).run(local_arrays, zero, axes), strict=True)
    assert len(set(names)) == 1
    assert names[0], "there are none"
    assert all(name.startswith("local/") and axes_in(name, axes) for name, _ in names[0])
    for name, shape in names[0]:
        assert shape[0] == 4
        assert sorted(offsets[name] for offsets in held) == [0, 1, 2, 3]
    assert all(again)


def axes_in(name: str, axes: dict[str, int]) -> bool:
    return all(f"{axis}{size}" in name for axis, size in axes.items())


def test_two_level_sums_send_a_share_between_replicas():
    """dp_replicate 2 x dp_shard 2, zero=0: scattered inside, 1/2 of it across, gathered inside."""
    for found, numbers in pool(4).run(bytes_by_axis, 0, "none", {"dp_replicate": 2, "dp_shard": 2}):
        assert found["dp_shard+cp reduce_scatter"] == 4 * numbers
        assert found["dp_replicate all_reduce"] == 2 * numbers
        assert found["dp_shard+cp all_gather"] == 2 * numbers
        assert {key for key in found if "dp" in key} == {
            "dp_shard+cp reduce_scatter",
            "dp_replicate all_reduce",
            "dp_shard+cp all_gather",
        }


def test_between_replicas_alone_gradients_are_compressed():
    axes = {"dp_replicate": 2, "dp_shard": 2}
    rows = sum(shape[1] * shape[2] for name, shape in pool(4).run(local_arrays, 1, axes)[0][0] if "worker" in name)
    wire = rows * (1 + 32 / CHUNK) / 8
    for found, numbers in pool(4).run(bytes_by_axis, 1, "onebit", axes):
        assert numbers / 2 < rows < 0.7 * numbers  # of small buffers much is filling
        assert found["dp_shard+cp reduce_scatter"] == pytest.approx(4 * numbers, rel=0.05)
        assert found["dp_replicate all_to_all"] == pytest.approx(wire, rel=0.01)
        assert found["dp_replicate all_reduce"] == 0


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_added_in_float32_under_bf16(zero):
    """Weights are gathered in bfloat16; nothing that is added over ranks is."""
    for summed, gathered, kept in pool(2).run(dtypes_on_the_wire, zero):
        assert summed == {"float32"}
        assert gathered == ({"bfloat16"} if zero else set())
        assert kept == {"float32"}


@pytest.mark.parametrize("axes", [{"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 1, "dp_shard": 4}])
@pytest.mark.parametrize("zero", [0, 1])
def test_the_layout_counts_the_errors(axes, zero):
    """But for what fills up chunks of small buffers."""
    rows = sum(shape[1] * shape[2] for _, shape in pool(4).run(local_arrays, zero, axes)[0][0])
    run = default_run(model=MODEL, parallel=ThreeD(tp=1, pp=1, zero=zero, compress="onebit", **axes))
    told = state(Case.of(run, Mesh.of(axes)), 0)["errors of compression"]
    assert 0.7 * 4 * rows < told <= 4 * rows
