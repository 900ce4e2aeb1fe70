"""Decoder: computation and dtypes of each module, custom modules and matmuls, loss, edits of the node tree."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gangline.model.build import construct
from gangline.model.init import make_whole_model
from gangline.model.linear import Linear
from gangline.model.linear_nodes import LinearNode
from gangline.model.tree import Node, get_parameter_shapes, iterate_nodes, replace_node
from gangline_basics.model.attention import attention
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.decoder_nodes import FeedForwardNode, NormNode
from gangline_basics.model.loss import loss
from gangline_basics.model.norm import RMSNorm
from gangline_basics.model.plan import plan_decoder

SMALL = DecoderConfig(vocab_size=61, dim=24, layers=3, heads=4, kv_heads=2, head_dim=8, ffn_dim=40, qk_norm=True)


def built(config: DecoderConfig = SMALL, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    tree, plan = plan_decoder(config)
    return make_whole_model(tree, plan, seed=seed, dtype=dtype)


def test_stages_in_sequence_match_model(random_batch):
    model, batch = built(), random_batch(2, 9, 61)
    hidden = model.embed(batch)
    assert hidden.shape == (2, 9, 24)
    for block in model.blocks:
        hidden = block(hidden, batch)
        assert hidden.shape == (2, 9, 24)
    assert torch.equal(model.head(hidden, batch), model(batch))
    assert torch.equal(model.head.compute_logits(hidden), model.compute_logits(batch))


def test_loss_sums_over_unmasked_targets(random_batch):
    model, batch = built(), random_batch(2, 9, 61)
    log_p = model.compute_logits(batch).log_softmax(-1)
    expected = -sum(log_p[b, t, batch.targets[b, t]] for b in range(2) for t in range(9) if batch.loss_mask[b, t])
    assert batch.loss_mask.sum() < 18
    assert model(batch).shape == ()
    torch.testing.assert_close(model(batch), expected, rtol=1e-13, atol=0)


def test_logits_depend_on_past_tokens_only(random_batch):
    model, batch = built(), random_batch(1, 12, 61)
    before = model.compute_logits(batch)
    changed = replace(batch, tokens=batch.tokens.clone())
    changed.tokens[0, 7] = (changed.tokens[0, 7] + 1) % 61
    after = model.compute_logits(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@pytest.mark.parametrize("tied", [False, True])
def test_tied_head_shares_embedding_parameter(tied, random_batch):
    tree, plan = plan_decoder(replace(SMALL, tied=tied))
    model = make_whole_model(tree, plan, seed=0)
    assert (model.head.weight is model.embed.weight) == tied
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == get_parameter_shapes(tree)
    model(random_batch(2, 5, 61)).backward()
    unseen = [t for t in range(61) if t not in random_batch(2, 5, 61).tokens]
    assert bool(model.embed.weight.grad[unseen].any()) == tied  # the gradient comes only through the head


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_dtype_matches_float64_model(dtype, random_batch):
    exact, batch = built(), random_batch(2, 8, 61)
    model = built(dtype=torch.float64).to(dtype)
    hidden = model.hidden(batch)
    assert hidden.dtype == dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert model.compute_logits(batch).dtype == wide
    result = model(batch)
    assert result.dtype == wide
    result.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(result.double(), exact(batch), rtol=30 * torch.finfo(dtype).eps, atol=0)


def test_rms_norm_computes_in_float32():
    norm = RMSNorm(NormNode(dim=32, eps=1e-5))
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 32)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), exact, rtol=1e-5, atol=1e-6)
    big = torch.full((1, 32), 300.0, dtype=torch.float16)  # the square exceeds the range of float16
    torch.testing.assert_close(norm(big), norm.weight.half()[None], rtol=2e-3, atol=0)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_attention_matches_causal_softmax_with_grouped_keys():
    q, k, v = torch.randn(2, 6, 5, 8).double(), torch.randn(2, 2, 5, 8).double(), torch.randn(2, 2, 5, 8).double()
    out = attention(q, k, v, None, torch.arange(5).expand(2, 5))
    for b in range(2):
        for h in range(6):
            for t in range(5):
                scores = q[b, h, t] @ k[b, h // 3, : t + 1].T / math.sqrt(8)
                torch.testing.assert_close(out[b, h, t], scores.softmax(-1) @ v[b, h // 3, : t + 1])


class TestLoss:
    def exact(self, hidden, weight, targets, mask):
        return F.cross_entropy(F.linear(hidden, weight)[mask], targets[mask], reduction="sum")

    @pytest.mark.parametrize("chunk", [1, 61 * 4, 1 << 25])
    def test_matches_torch_for_every_chunk_size(self, chunk, monkeypatch, random_batch):
        monkeypatch.setattr("gangline_basics.model.loss.CHUNK", chunk)
        batch = random_batch(3, 7, 61)
        tensors = [torch.randn(3, 7, 24).double(), torch.randn(61, 24).double()]
        results = []
        for function in (loss, self.exact):
            hidden, weight = (x.clone().requires_grad_() for x in tensors)
            value = function(hidden, weight, batch.targets, batch.loss_mask)
            (value * 0.37).backward()
            results.append((value, hidden.grad, weight.grad))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)

    def test_survives_logits_that_overflow_exp(self):
        hidden, weight = torch.full((1, 1, 1), 1.0), torch.tensor([[0.0], [500.0], [-500.0]])
        assert loss(hidden, weight, torch.tensor([[1]]), torch.tensor([[True]])).item() == 0.0
        assert loss(hidden, weight, torch.tensor([[0]]), torch.tensor([[True]])).item() == 500.0

    def test_masked_targets_may_be_any_value(self):
        hidden, weight = torch.randn(1, 2, 4, requires_grad=True), torch.randn(5, 4)
        value = loss(hidden, weight, torch.tensor([[3, -100]]), torch.tensor([[True, False]]))
        value.backward()
        assert value.isfinite()
        assert hidden.grad[0, 0].any()
        assert not hidden.grad[0, 1].any()

    def test_is_zero_if_all_targets_are_masked(self):
        hidden = torch.randn(1, 2, 4, requires_grad=True)
        value = loss(hidden, torch.randn(5, 4), torch.tensor([[3, 1]]), torch.zeros(1, 2, dtype=torch.bool))
        value.backward()
        assert value.item() == 0.0
        assert not hidden.grad.any()


def test_strategy_can_replace_seams_and_matmuls(random_batch):
    model, batch, calls = built(), random_batch(2, 6, 61), []
    expected = model(batch)

    def counting(name, function):
        def called(*args):
            calls.append((name, [None if a is None else tuple(a.shape) for a in args]))
            return function(*args)

        return called

    for block in model.blocks:
        block.attention.attention = counting("attention", block.attention.attention)
    model.head.loss = counting("loss", model.head.loss)
    for module in model.modules():
        if isinstance(module, Linear):
            module.matmul = counting("matmul", module.matmul)
    model.embed.lookup = counting("lookup", model.embed.lookup)
    assert torch.equal(model(batch), expected)
    assert [shapes for name, shapes in calls if name == "attention"] == [
        [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), None, (2, 6)]
    ] * 3
    assert [shapes for name, shapes in calls if name == "loss"] == [[(2, 6, 24), (61, 24), (2, 6), (2, 6)]]
    assert sum(name == "matmul" for name, _ in calls) == 3 * 7
    assert sum(name == "lookup" for name, _ in calls) == 1


def test_modules_adapt_to_sharded_weights(random_batch):
    """Check half of the heads and of the feed-forward on each of two ranks: outputs sum to the unsharded output."""
    batch = random_batch(2, 6, 61)
    whole = built(replace(SMALL, layers=1)).blocks[0]
    x = torch.randn(2, 6, 24).double()
    attended, fed = [], []
    for rank in range(2):
        block = built(replace(SMALL, layers=1)).blocks[0]
        for module, names in ((block.attention, ("wq", "wk", "wv")), (block.feed_forward, ("w_gate", "w_up"))):
            for name in names:
                linear = getattr(module, name)
                linear.weight = nn.Parameter(linear.weight.chunk(2, dim=0)[rank])
        for linear in (block.attention.wo, block.feed_forward.w_down):
            linear.weight = nn.Parameter(linear.weight.chunk(2, dim=1)[rank])
        attended.append(block.attention(x, batch))
        fed.append(block.feed_forward(x))
    torch.testing.assert_close(sum(attended), whole.attention(x, batch), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(fed), whole.feed_forward(x), rtol=1e-12, atol=1e-14)


def test_model_is_built_on_meta_device():
    tree, _ = plan_decoder(SMALL)
    model = construct(tree)
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())


@dataclass(frozen=True, kw_only=True)
class ScaleNode(Node):
    module: ClassVar[str] = f"{__name__}:Scale"
    by: float


class Scale(nn.Module):
    def __init__(self, node: ScaleNode) -> None:
        super().__init__()
        self.by = node.by

    def forward(self, x):
        return x * self.by


class TestTree:
    def test_paths_are_module_names(self):
        tree, _ = plan_decoder(SMALL)
        modules = dict(construct(tree).named_modules())
        for path, node in iterate_nodes(tree):
            assert type(modules[path]).__name__ == node.module.split(":")[1]

    def test_replace_node_keeps_all_unrelated_nodes(self):
        tree, _ = plan_decoder(SMALL)
        other = FeedForwardNode(dim=24, ffn_dim=8)
        changed = replace_node(tree, "blocks.1.feed_forward", other)
        inside = {f"blocks.1.feed_forward.{name}" for name in ("w_gate", "w_up", "w_down")}
        assert {path for path, node in iterate_nodes(changed) if dict(iterate_nodes(tree))[path] != node} == {
            "",
            "blocks.1",
            "blocks.1.feed_forward",
            *inside,
        }
        assert dict(iterate_nodes(changed))["blocks.1.feed_forward"] is other
        assert replace_node(tree, "", other) is other

    @pytest.mark.parametrize("path", ["blocks.7", "blocks.1.nothing", "blocks", "embed.weight"])
    def test_refuses_unknown_path(self, path):
        with pytest.raises(LookupError, match="no node"):
            replace_node(plan_decoder(SMALL)[0], path, FeedForwardNode(dim=24, ffn_dim=8))

    def test_linear_nodes_take_sizes_from_parent_node(self):
        tree, _ = plan_decoder(SMALL)
        node = dict(iterate_nodes(tree))["blocks.1.feed_forward"]
        assert replace(node, ffn_dim=8).w_down == LinearNode(in_features=8, out_features=24)
        biased = replace_node(tree, "blocks.1.attention.wq", LinearNode(bias=True))
        shapes = get_parameter_shapes(biased)
        assert shapes["blocks.1.attention.wq.bias"] == shapes["blocks.1.attention.wq.weight"][:1]
        other = replace_node(tree, "blocks.1.attention.wo", ScaleNode(by=0.5))
        attention = dict(iterate_nodes(other))["blocks.1.attention"]
        assert replace(attention, q_norm=None).wo == ScaleNode(by=0.5)

    def test_third_party_node_builds_its_module(self, random_batch):
        tree, plan = plan_decoder(SMALL)
        changed = replace_node(tree, "blocks.1.feed_forward", ScaleNode(by=0.5))
        model = make_whole_model(changed, plan, seed=0, dtype=torch.float64)
        assert isinstance(model.blocks[1].feed_forward, Scale)
        x = torch.randn(1, 4, 24).double()
        batch = random_batch(1, 4, 61)
        middle = x + model.blocks[1].attention(model.blocks[1].attention_norm(x), batch)
        torch.testing.assert_close(
            model.blocks[1](x, batch), middle + 0.5 * model.blocks[1].feed_forward_norm(middle), rtol=1e-13, atol=0
        )


@pytest.mark.nightly
def test_a_block_compiles_in_one_graph(random_batch):
    model, batch = built(dtype=torch.float32), random_batch(2, 8, 61, documents=2)
    expected = model(batch)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True)
    compiled = model(batch)
    compiled.backward()
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_model_overfits_one_batch(random_batch):
    model, batch = built(dtype=torch.float32), random_batch(4, 16, 61)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model(batch).item() / batch.loss_mask.sum().item()
    assert abs(first - math.log(61)) < 0.2
    for _ in range(60):
        optimizer.zero_grad()
        value = model(batch) / batch.loss_mask.sum()
        value.backward()
        optimizer.step()
    assert value.item() < 0.1
