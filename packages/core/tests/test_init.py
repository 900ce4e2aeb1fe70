"""Weight initialization: values depend on seed and name only, for any shard that is requested."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from gangline import draws
from gangline.draws import BLOCK_ROWS, draw_uniforms, fill
from gangline.model.init import initialise, list_shards, make_whole_model
from gangline.shard import Shard
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.plan import plan_decoder


def whole(shape, *, name="w", seed=0, distribution="normal", scale=1.0, dtype=torch.float32) -> torch.Tensor:
    return box(
        shape, (0,) * len(shape), shape, name=name, seed=seed, distribution=distribution, scale=scale, dtype=dtype
    )


def box(shape, offset, local, *, name="w", seed=0, distribution="normal", scale=1.0, dtype=torch.float32):
    out = torch.full(local, torch.nan, dtype=dtype)
    fill(out, seed=seed, name=name, offset=offset, shape=shape, distribution=distribution, scale=scale)
    return out


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 150), min_size=0, max_size=2))) + tuple(
        draw(st.lists(st.integers(1, 9), min_size=0, max_size=2))
    )
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    local = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    return shape, offset, local


@settings(max_examples=150, deadline=None)
@given(boxes(), st.sampled_from(["normal", "uniform", "constant"]))
def test_box_equals_slice_of_full_tensor(drawn, distribution):
    shape, offset, local = drawn
    slices = tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))
    expected = whole(shape, distribution=distribution)[slices]
    assert torch.equal(box(shape, offset, local, distribution=distribution), expected)


@pytest.mark.parametrize("shape", [(130, 6), (3, 70, 6)])
def test_non_contiguous_view_is_filled(shape):
    storage = torch.full((*shape[:-2], shape[-1], shape[-2]), torch.nan)
    view = storage.transpose(-1, -2)
    fill(view, seed=0, name="w", offset=(0,) * len(shape), shape=shape, distribution="normal", scale=1.0)
    assert torch.equal(view, whole(shape))


def test_shard_draws_only_overlapping_blocks(monkeypatch):
    seen = []
    generator = np.random.Generator

    class Counting(generator):
        def standard_normal(self, size, **more):
            seen.append(size)
            return super().standard_normal(size, **more)

    monkeypatch.setattr(np.random, "Generator", Counting)
    box((100_000, 8), (5 * BLOCK_ROWS + 1, 0), (BLOCK_ROWS, 8))
    assert seen == [(BLOCK_ROWS, 8)] * 2


def test_draws_of_different_names_and_seeds_are_uncorrelated():
    drawn = [whole((200, 50)), whole((200, 50), name="v"), whole((200, 50), seed=1)]
    drawn += [whole((400, 50))[200:]]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
            assert abs(correlation) < 0.04  # 4 standard deviations of 10,000 pairs
    first, second = whole((2 * BLOCK_ROWS, 50)).split(BLOCK_ROWS)
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.08


def test_normal_and_uniform_have_expected_moments():
    normal = whole((500, 400), scale=0.02).double()
    assert abs(normal.mean()) < 4 * 0.02 / math.sqrt(200_000)
    assert normal.std() == pytest.approx(0.02, rel=0.01)
    kurtosis = ((normal - normal.mean()) ** 4).mean() / normal.var() ** 2
    assert kurtosis == pytest.approx(3.0, abs=0.06)
    uniform = whole((500, 400), distribution="uniform", scale=0.5).double()
    assert uniform.min() >= -0.5
    assert uniform.max() <= 0.5
    assert abs(uniform.mean()) < 4 * 0.5 / math.sqrt(3 * 200_000)
    assert uniform.std() == pytest.approx(0.5 / math.sqrt(3), rel=0.01)


def test_drawn_numbers_match_recorded_values():
    """Compare with recorded values, so that another library version cannot change every run unnoticed."""
    normal = [-0.14543133974075317, 0.004338253289461136, -0.3029082119464874, -0.9629247188568115]
    assert whole((2, 2), name="embed.weight", seed=7).flatten().tolist() == normal
    drawn = draw_uniforms(7, 3, torch.tensor([0, 1, 2]), "dropout")
    assert drawn.tolist() == [0.3086974620819092, 0.9770220518112183, 0.06209498643875122]


def test_other_dtypes_hold_the_same_numbers_rounded():
    exact = whole((70, 5))
    assert torch.equal(whole((70, 5), dtype=torch.float64), exact.double())
    assert torch.equal(whole((70, 5), dtype=torch.bfloat16), exact.bfloat16())


def test_unknown_distribution_is_refused():
    with pytest.raises(ValueError, match=r"w: unknown distribution 'cauchy'; choices: normal, uniform, constant"):
        whole((2, 2), distribution="cauchy")


CONFIG = DecoderConfig(vocab_size=150, dim=24, layers=2, heads=4, kv_heads=2, ffn_dim=40, qk_norm=True, tied=True)


def test_sharded_model_has_weights_of_full_model():
    tree, plan = plan_decoder(CONFIG)
    model = make_whole_model(tree, plan, seed=3)
    for shard in list_shards(model, plan):
        dim = len(shard.global_shape) - 1
        half = shard.global_shape[dim] // 2
        offset = (*shard.offset[:dim], half)
        local = torch.empty_like(shard.local.narrow(dim, half, shard.global_shape[dim] - half))
        initialise([Shard(shard.name, shard.global_shape, shard.dtype, offset, local)], plan, 3)
        assert torch.equal(local, shard.local.narrow(dim, half, local.shape[dim]))


def test_initial_weights_follow_the_plan():
    tree, plan = plan_decoder(CONFIG)
    parameters = dict(make_whole_model(tree, plan, seed=0).named_parameters())
    residual = 0.02 / math.sqrt(2 * 2)
    for name, parameter in parameters.items():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = residual if name.endswith(("wo.weight", "w_down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * parameter.numel())), name
    assert not torch.equal(parameters["blocks.0.attention.wq.weight"], parameters["blocks.1.attention.wq.weight"])


def test_parameter_without_init_is_refused():
    _, plan = plan_decoder(CONFIG)
    with pytest.raises(LookupError, match=r"no Init for parameter 'blocks.0.mystery.weight'"):
        initialise([Shard("model/blocks.0.mystery.weight", (2,), torch.float32, (0,), torch.empty(2))], plan, 0)


def test_threads_draw_same_numbers_as_one_thread(monkeypatch):
    """Draw with one torch thread per thread of the pool, because more threads could exceed a container's limit."""
    used, own = [], draws.make_key

    def key_of(*parts):
        used.append((threading.get_ident(), torch.get_num_threads()))
        return own(*parts)

    shape, kept = (5 * BLOCK_ROWS + 3, 40), torch.get_num_threads()
    alone = whole(shape)
    monkeypatch.setattr(draws, "ALONE", 1)
    monkeypatch.setattr(draws, "make_key", key_of)
    torch.set_num_threads(3)
    try:
        assert torch.equal(whole(shape), alone)
        assert {count for _, count in used} == {1}
        assert threading.get_ident() not in {thread for thread, _ in used}
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(kept)


def test_threaded_init_works_in_inference_mode(monkeypatch):
    monkeypatch.setattr(draws, "ALONE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    shape = (3 * BLOCK_ROWS, 5)
    with torch.inference_mode():
        found = whole(shape)
    assert torch.equal(found, whole(shape))
