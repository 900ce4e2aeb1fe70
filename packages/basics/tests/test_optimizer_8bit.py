"""`optimizer=adamw8bit`: codes of the moments and steps, compared with an elementwise implementation."""

from __future__ import annotations

from fractions import Fraction
from math import sqrt

import pytest
import torch

from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.shard import Box, Division, Layout, Registry
from gangline_basics.optimizer.adamw8bit import build_scales_layout
from gangline_basics.optimizer.codes import decode, encode, make_levels
from gangline_testkit.sessions import open_session, train_session


def dynamic_tree(signed: bool) -> list[float]:
    """Return the levels of section 2.2 of the paper, by bits: a sign, zeros for the power of ten, a one, a fraction."""
    found = {Fraction(0), Fraction(1)}
    for zeros in range(7):
        bits = 6 - zeros + (not signed)  # bits of the fraction
        for fraction in range(2**bits):
            share = Fraction(2 * fraction + 1, 2 ** (bits + 1))
            value = (Fraction(1, 10) + share * Fraction(9, 10)) / 10**zeros
            found |= {value, -value} if signed else {value}
    return [float(value) for value in sorted(found)]


@pytest.mark.parametrize("signed", [True, False])
def test_8bit_codebook_matches_dynamic_tree_quantization(signed):
    found = make_levels(signed, torch.device("cpu"))
    values = found.values
    assert len(values) == 256
    assert values.tolist() == pytest.approx(dynamic_tree(signed), rel=1e-12)
    assert values[found.zero] == 0
    between = ((values[1:] + values[:-1]) / 2).float()
    near = torch.cat([between, between.nextafter(torch.tensor(2.0)), between.nextafter(torch.tensor(-2.0))])
    x = torch.cat([near, values.float(), torch.rand(20_000) * 2 - 1, 10 ** -(torch.rand(20_000) * 9), torch.zeros(1)])
    x = x if signed else x.abs()
    want = torch.bucketize(x.abs(), between[found.zero :])  # the smaller of two equally near levels
    want = torch.where(x < 0, -want.clamp(max=found.zero), want) + found.zero
    assert found.find_nearest(x).equal(want.int())


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [40, 16, 5])
def test_encoding_picks_nearest_level_of_block(signed, width):
    x = torch.randn(6, width, dtype=torch.float64) ** 3
    x = x if signed else x.square()
    x[0, :5] = 0.0
    codes, scales = encode(x, 16, signed)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, x.shape, (6, -(-width // 16)))
    found = decode(codes, scales, 16, signed, torch.float64)
    tree = torch.tensor(dynamic_tree(signed), dtype=torch.float64)
    for row in range(6):
        for column in range(width):
            block = x[row, column // 16 * 16 : column // 16 * 16 + 16]
            scale = block.abs().max().float().double()
            assert scales[row, column // 16] == scale
            nearest = (tree * scale - x[row, column]).abs().min()
            if not signed and float(scale) and float(x[row, column] / scale) < float(tree[1]) / 2:
                nearest = tree[1] * scale - x[row, column]  # a nonzero square is never encoded as 0
            assert (found[row, column] - x[row, column]).abs() == pytest.approx(float(nearest), abs=1e-7 * float(scale))


def test_blocks_of_row_are_encoded_independently():
    x = torch.randn(4, 40)
    codes, scales = encode(x, 8, True)
    for start, stop in ((0, 16), (16, 40)):
        theirs, sizes = encode(x[1:3, start:stop], 8, True)
        assert theirs.equal(codes[1:3, start:stop])
        assert sizes.equal(scales[1:3, start // 8 : stop // 8])


def stepped(path, rates, *words):
    """Take steps with random gradients; return (weights before, gradients of each step, weights after) by name."""
    started = open_session(path, *words)
    named = {p.name: p.pieces[0].tensor for p in started.runtime.parameters()}
    before = {name: x.detach().clone() for name, x in named.items()}
    gradients = []
    for rate in rates:
        torch.manual_seed(len(gradients))
        gradients.append({name: torch.randn_like(x) for name, x in before.items()})
        for name, x in named.items():
            x.grad = gradients[-1][name].clone()
        started.optimizer.step(rate)
    return before, gradients, {name: x.detach() for name, x in named.items()}


def test_first_step_matches_adamw(tmp_path):
    """Check that the initial moments, which are zeros, are encoded exactly."""
    _, _, full = stepped(tmp_path / "full", [1e-2], "optimizer.weight_decay=0.3")
    words = ("optimizer=adamw8bit", "optimizer.min_8bit_size=1", "optimizer.weight_decay=0.3")
    _, _, coded = stepped(tmp_path / "coded", [1e-2], *words)
    for name, weight in full.items():
        torch.testing.assert_close(coded[name], weight, rtol=1e-12, atol=1e-14)


def by_hand(weight, gradients, rates, block, decay, betas, eps):
    """Return the weight after AdamW steps, computed row by row and block by block on lists of numbers."""
    one, two = betas
    trees = [dynamic_tree(True), dynamic_tree(False)]
    for row in range(len(weight)):
        for start in range(0, len(weight[row]), block):
            columns = range(start, min(start + block, len(weight[row])))
            kept = [[0.0] * len(columns), [0.0] * len(columns)]
            for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
                for place, column in enumerate(columns):
                    g = gradient[row][column]
                    kept[0][place] = one * kept[0][place] + (1 - one) * g
                    kept[1][place] = two * kept[1][place] + (1 - two) * g * g
                    root = sqrt(kept[1][place] / (1 - two**step)) + eps
                    weight[row][column] *= 1 - rate * decay
                    weight[row][column] -= rate * kept[0][place] / (1 - one**step) / root
                for moment, tree, least in zip(kept, trees, (0, 1), strict=True):
                    scale = float(torch.tensor(max(abs(x) for x in moment), dtype=torch.float32))
                    moment[:] = [
                        scale * min(tree[least:], key=lambda level, x=x: abs(level - x / scale)) for x in moment
                    ]
    return weight


def test_steps_match_adamw_on_decoded_moments(tmp_path):
    rates, name = [1e-2, 5e-3, 2e-2, 1e-2], "blocks.0.attention.wq.weight"
    words = ("optimizer=adamw8bit", "optimizer.min_8bit_size=1", "optimizer.block=12", "optimizer.weight_decay=0.3")
    before, gradients, after = stepped(tmp_path / "coded", rates, *words)
    given = [gradient[name].tolist() for gradient in gradients]
    found = by_hand(before[name].tolist(), given, rates, 12, 0.3, (0.9, 0.95), 1e-8)
    torch.testing.assert_close(after[name], torch.tensor(found, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    _, _, full = stepped(tmp_path / "full", rates, "optimizer.weight_decay=0.3")
    assert not torch.allclose(after[name], full[name], rtol=1e-6, atol=1e-8)
    vector = "blocks.0.attention_norm.weight"
    torch.testing.assert_close(after[vector], full[vector], rtol=1e-12, atol=1e-14)


def test_explain_reports_optimizer_state_bytes(tmp_path):
    """Check 8-bit matrices, also with rows that are not divisible into blocks, and tensors below `min_8bit_size`."""
    started = open_session(tmp_path / "run", "optimizer=adamw8bit", "optimizer.min_8bit_size=600", "optimizer.block=12")
    held = list(started.optimizer.shards())
    run = started.run
    said = run.parallel.explain(run, Mesh.of(run.parallel.size_axes(1))).ranks[0].bytes["optimizer state"]
    assert {str(shard.dtype) for shard in held} == {"torch.uint8", "torch.float32", "torch.float64"}
    assert said == sum(shard.local.numel() * shard.local.itemsize for shard in held)


def test_scales_are_sharded_with_their_blocks():
    mesh = Mesh.of({"dp_shard": 2, "tp": 2})
    rows, columns = Division(("dp_shard",), ((0, 1, 3),), rows=True), Division(("tp",), ((0, 16, 20),), dim=1)
    registry = Registry.of(mesh, {"codes": Layout((3, 20), divisions=(columns, rows))})
    scales = Registry(mesh, {"scales": build_scales_layout("x", registry["codes"], 8)})
    assert scales["scales"].shape == (3, 3)
    for rank in range(4):
        (codes, primary), (found, same) = (
            *registry.list_rank_boxes("codes", rank),
            *scales.list_rank_boxes("scales", rank),
        )
        (row, column), (height, width) = codes.offset, codes.shape
        assert (found, same) == (Box((row, column // 8), (height, -(-width // 8))), primary)
    with pytest.raises(UserError, match=r"optimizer\.block=32: the layout shards x at column 16 of 20, inside a block"):
        build_scales_layout("x", registry["codes"], 32)


@pytest.mark.parametrize("block", [5, 256])
def test_moments_resume_with_another_block_size(tmp_path, block):
    """Check that each moment becomes the nearest level of the new block."""
    words = ("optimizer=adamw8bit", "optimizer.min_8bit_size=1", "checkpoint.every=2", "run.steps=2")
    assert train_session(tmp_path / "run", *words, "optimizer.block=12") == 0
    before, after = (
        open_session(tmp_path / "run", *words, f"optimizer.block={size}").optimizer for size in (12, block)
    )
    kept, found = ({shard.name: shard.local for shard in each.shards()} for each in (before, after))
    for name, codes in found.items():
        state, _, of = name.removeprefix("optimizer/").partition("/")
        if codes.dtype != torch.uint8:
            continue
        signed = state == "exp_avg"
        scales = f"optimizer/{state}_scales/{of}"
        was = decode(kept[name], kept[scales], 12, signed, torch.float64)
        want, sizes = encode(was, block, signed)
        assert codes.equal(want), name
        assert found[scales].equal(sizes), name
    assert before.state()["steps"] == after.state()["steps"] == 2
