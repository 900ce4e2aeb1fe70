"""Rotary position embedding: angles, scaling, dtypes, relative distance, cache of the rotation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gangline.model.init import make_whole_model
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.last_value_cache import LastValueCache
from gangline_basics.model.plan import plan_decoder
from gangline_basics.model.rope import compute_angles, rotate_pair
from gangline_basics.model.rope_rates import BandScaling, Rope, compute_frequencies

LLAMA = BandScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


def test_pairs_rotate_by_position_times_frequency():
    q = torch.randn(1, 1, 1, 8).double()
    position = torch.tensor([[5]])
    turned, _ = rotate_pair(q, q, position, compute_frequencies(Rope(theta=100.0), 8))
    for i in range(4):
        angle = 5 * 100.0 ** (-2 * i / 8)
        a, b = q[0, 0, 0, i], q[0, 0, 0, i + 4]
        expected = torch.stack([a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)])
        torch.testing.assert_close(turned[0, 0, 0, [i, i + 4]], expected, rtol=1e-12, atol=1e-14)


def test_dot_product_depends_on_distance_only():
    q, k = torch.randn(1, 1, 1, 16).double(), torch.randn(1, 1, 1, 16).double()

    def product(at_q: int, at_k: int) -> torch.Tensor:
        q_turned, _ = rotate_pair(q, q, torch.tensor([[at_q]]), compute_frequencies(Rope(), 16))
        k_turned, _ = rotate_pair(k, k, torch.tensor([[at_k]]), compute_frequencies(Rope(), 16))
        return (q_turned * k_turned).sum()

    torch.testing.assert_close(product(3, 1), product(1003, 1001), rtol=1e-11, atol=0)
    assert abs(product(3, 1) - product(3, 2)) > 1e-4


def test_scaling_stretches_long_wavelengths_only():
    plain, scaled = compute_frequencies(Rope(500_000.0), 128), compute_frequencies(Rope(500_000.0, LLAMA), 128)
    between = 0
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192 / 1:
            assert after == pytest.approx(before / 8, rel=1e-12)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before, rel=1e-12)
            between += 1
    assert between > 0
    assert plain[0] == scaled[0] == 1.0


def test_rope_scaling_option_changes_logits(random_batch):
    config = DecoderConfig(vocab_size=31, dim=16, layers=1, heads=2, ffn_dim=16, rope_original_max_position=64)
    batch = random_batch(1, 32, 31)
    plain, scaled = (
        make_whole_model(*plan_decoder(replace(config, rope_scaling_factor=factor)), seed=0).compute_logits(batch)
        for factor in (None, 8.0)
    )
    assert not torch.equal(plain, scaled)
    assert torch.equal(plain[:, :1], scaled[:, :1])  # position 0 is not rotated


def test_angles_are_exact_to_their_dtype():
    position, rates = torch.arange(4096)[None], compute_frequencies(Rope(), 64)
    cos64, _ = compute_angles(position, rates, torch.float64)
    cos32, _ = compute_angles(position, rates, torch.float32)
    assert cos64.shape == (1, 1, 4096, 32)
    assert (cos32 - cos64).abs().max() < 4096 * 2.0**-23  # twice the rounding error of an angle of 4096


def test_half_precision_is_rotated_in_float32():
    q = torch.randn(1, 2, 512, 16)
    position, rates = torch.arange(512)[None], compute_frequencies(Rope(), 16)
    exact, _ = rotate_pair(q.bfloat16().double(), q.double(), position, rates)
    ours, _ = rotate_pair(q.bfloat16(), q.bfloat16(), position, rates)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, exact.bfloat16()) or (ours - exact).abs().max() <= exact.abs().max() * 2.0**-8


class TestRecall:
    def test_computes_once_for_one_tensor_and_key(self):
        cache, calls, source = LastValueCache(), [], torch.arange(3)
        for _ in range(3):
            assert cache("a", source, lambda: calls.append(1) or len(calls)) == 1
        assert cache("b", source, lambda: calls.append(1) or len(calls)) == 2
        assert cache("b", source.clone(), lambda: calls.append(1) or len(calls)) == 3

    def test_recomputes_after_in_place_write(self):
        cache, source = LastValueCache(), torch.arange(3)
        assert cache(None, source, lambda: source.sum().item()) == 3
        source += 1
        assert cache(None, source, lambda: source.sum().item()) == 6

    def test_does_not_cache_inference_tensors(self):
        cache = LastValueCache()
        with torch.inference_mode():
            source = torch.arange(3)
            assert cache(None, source, lambda: source.sum().item()) == 3
            source += 1
            assert cache(None, source, lambda: source.sum().item()) == 6
