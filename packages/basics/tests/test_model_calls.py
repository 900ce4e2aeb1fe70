"""Attention and loss calls declared by a model, compared with reference computations; their options."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from gangline.config.check import find_meaningless
from gangline.config.defaults import build_default_run
from gangline.model import forward_context
from gangline.model.calls import AttentionCall, LossCall
from gangline.model.forward_context import Collected, Frame
from gangline.model.init import make_whole_model
from gangline.model.tree import Node, replace_node
from gangline_basics.model.attention import get_plain_attention
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.decoder_nodes import AttentionNode
from gangline_basics.model.flex import attend_flex, make_block_mask
from gangline_basics.model.loss import CrossEntropy
from gangline_basics.model.plan import plan_decoder
from gangline_basics.model.seams import call_at, get_calls

SMALL = DecoderConfig(vocab_size=29, dim=16, layers=3, heads=4, kv_heads=2, ffn_dim=24)
SINKS = {"sinks": "sinks.weight"}
CALLS = {
    "plain": {},
    "both ways": {"causal": False},
    "window": {"window": 3},
    "scale": {"scale": 0.2},
    "cap": {"soft_cap": 0.7},
    "sinks": SINKS,
    "all": {"window": 4, "scale": 0.3, "soft_cap": 1.5, **SINKS},
}


def inputs(documents: bool, width: int = 8):
    """Return q, k, v, sinks, document and position of two sequences. documents: whether each has three documents."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, width, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, generator=generator)
    position, document = torch.arange(9).expand(2, 9), None
    if documents:
        document = torch.stack(
            [(torch.arange(9)[:, None] >= torch.tensor(starts)).sum(1) for starts in ([3, 4], [1, 6])]
        )
        first = torch.stack([(row[:, None] == row).int().argmax(-1) for row in document])
        position = position - first
    return q, k, v, sinks, document, position


def by_hand(call: AttentionCall, q, k, v, sinks, document, position):
    out = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(9)).tolist():
        keys = [j for j in range(9) if document is None or document[b, i] == document[b, j]]
        keys = [j for j in keys if j <= i] if call.causal else keys
        if call.window is not None:
            keys = [j for j in keys if position[b, i] - call.window < position[b, j] <= position[b, i]]
        z = torch.stack([q[b, h, i] @ k[b, h // 2, j] for j in keys]) * (call.scale or 1 / math.sqrt(q.shape[-1]))
        z = z if call.soft_cap is None else call.soft_cap * (z / call.soft_cap).tanh()
        below = z.exp().sum() + (sinks[h].exp() if call.sinks else 0)
        out[b, h, i] = z.exp() / below @ v[b, h // 2, keys]
    return out


@pytest.mark.parametrize("documents", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("name", CALLS)
def test_plain_attention_matches_reference_for_every_call(name, documents):
    call = AttentionCall(**CALLS[name])
    q, k, v, sinks, document, position = inputs(documents)
    more = (sinks,) if call.sinks else ()
    assert get_plain_attention(call).computes == call
    found = get_plain_attention(call)(q, k, v, document, position, *more)
    torch.testing.assert_close(found, by_hand(call, q, k, v, sinks, document, position), rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "plain"])
def test_flex_attention_matches_reference(name, documents):
    """Check the masks and score modifications with the forward pass of FlexAttention on the CPU."""
    call = AttentionCall(**CALLS[name])
    q, k, v, sinks, document, position = inputs(documents, width=16)
    mask = make_block_mask(call, document, position, compiled=False)
    with torch.no_grad():
        found = attend_flex(q, k, v, mask, call, sinks if call.sinks else None, kernel=flex_attention)
    torch.testing.assert_close(found, by_hand(call, q, k, v, sinks, document, position), rtol=1e-6, atol=1e-6)


def test_z_loss_adds_gradients_and_metric(random_batch):
    batch = random_batch(2, 5, 11)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((2, 5, 6), (11, 6))]
    hidden, weight = (x.clone().requires_grad_() for x in given)
    collected = Collected()
    with forward_context.frame(Frame(coefficient=0.25, collected=collected)):
        loss = CrossEntropy(LossCall(z=0.3))(hidden, weight, batch.targets, batch.loss_mask)
        loss.backward(torch.full_like(loss, 0.25))
    ours = hidden.grad, weight.grad
    hidden, weight = (x.clone().requires_grad_() for x in given)
    logits = F.linear(hidden, weight)[batch.loss_mask]
    wanted = F.cross_entropy(logits, batch.targets[batch.loss_mask], reduction="sum")
    term = 0.3 * logits.logsumexp(-1).square().sum()
    ((wanted + term) * 0.25).backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=0)
    torch.testing.assert_close(collected.losses[(0, "", "z_loss")], term.detach(), rtol=1e-13, atol=0)
    for one, other in zip(ours, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"window": 3, "causal": False}, {"soft_cap": 0.0}], ids=["none", "both ways", "cap"]
)
def test_invalid_attention_call_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must be positive|a window must be"):
        AttentionCall(**wrong)


# --- options of the model ---------------------------------------------------------------------------------------------


def test_model_options_set_attention_and_loss_calls():
    config = replace(SMALL, window=5, full_every=2, attention_scale=0.1, soft_cap=30.0, sinks=True, z_loss=1e-4)
    tree, plan = plan_decoder(config)
    rest = {"scale": 0.1, "soft_cap": 30.0, **SINKS}
    windows = {f"blocks.{i}.attention": AttentionCall(window=w, **rest) for i, w in enumerate((5, None, 5))}
    assert get_calls(tree, plan, "attention") == windows
    assert get_calls(tree, plan, "loss") == {"head": LossCall(z=1e-4)}
    model = make_whole_model(tree, plan, seed=0, dtype=torch.float64)
    assert [block.attention.attention.computes for block in model.blocks] == list(windows.values())
    assert model.head.loss.computes == LossCall(z=1e-4)
    assert model.blocks[0].attention.sinks.weight.tolist() == [0.0] * 4


def test_invalid_model_options_are_refused():
    wrong = {"window": 0, "attention_scale": math.nan, "soft_cap": -1.0, "z_loss": -1.0}
    said = "\n".join(problem.what for problem in find_meaningless(build_default_run(model=replace(SMALL, **wrong))))
    assert all(f"model.{name}" in said for name in wrong)
    (problem,) = replace(SMALL, full_every=2).check(build_default_run())
    assert "model.full_every" in problem.what


# --- third-party nodes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Silent(AttentionNode):
    """Third-party node with its own attention function, which declares no attention call."""

    module: ClassVar[str] = "stranger:Windowed"


@dataclass(frozen=True, kw_only=True)
class Outspoken(Silent):
    def get_seams(self):
        return {"attention": AttentionCall(window=7)}


@dataclass(frozen=True, kw_only=True)
class Wrapper(Node):
    module: ClassVar[str] = "stranger:Wrapper"
    inner: Node


@dataclass(frozen=True, kw_only=True)
class Mixer(Node):
    module: ClassVar[str] = "stranger:Mixer"


def edited(path: str, change):
    tree, plan = plan_decoder(SMALL)
    return replace_node(tree, path, change(tree.blocks[1].attention)), plan


def as_class(cls):
    return lambda node: cls(dim=node.dim, heads=node.heads, kv_heads=node.kv_heads, head_dim=node.head_dim)


def test_node_with_custom_module_must_declare_attention_call():
    path = "blocks.1.attention"
    assert get_calls(*edited(path, as_class(Silent)), "attention")[path] is None
    assert get_calls(*edited(path, as_class(Outspoken)), "attention")[path] == AttentionCall(window=7)
    assert get_calls(*edited(path, lambda node: replace(node, window=2)), "attention")[path] == AttentionCall(window=2)


def test_wrapper_reports_call_of_inner_node():
    found = get_calls(*edited("blocks.1.attention", lambda node: Wrapper(inner=node)), "attention")
    assert "blocks.1.attention" not in found
    assert found["blocks.1.attention.inner"] == AttentionCall()
    silent = get_calls(*edited("blocks.1.attention", lambda node: Wrapper(inner=Mixer())), "attention")
    assert silent["blocks.1.attention"] is None


def test_custom_block_has_unknown_attention_call():
    found = get_calls(*edited("blocks.1", lambda _: Mixer()), "attention")
    assert found == {"blocks.0.attention": AttentionCall(), "blocks.1": None, "blocks.2.attention": AttentionCall()}
    assert call_at(found, "blocks.2.attention.inner") == AttentionCall()
    assert call_at(found, "blocks.1.attention") is None
    assert call_at(found, "head") is None


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_logit_soft_cap_gradients_match_autograd(chunk, monkeypatch):
    from gangline_basics.model import loss

    monkeypatch.setattr(loss, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets, counts = torch.arange(10).view(2, 5) % 7, torch.ones(2, 5, dtype=torch.bool)
    ours = loss.CrossEntropy(LossCall(soft_cap=1.5))(hidden, weight, targets, counts)
    capped = 1.5 * torch.tanh(hidden @ weight.T / 1.5)
    plain = torch.nn.functional.cross_entropy(capped.flatten(0, 1), targets.flatten(), reduction="sum")
    assert torch.allclose(ours, plain, rtol=1e-12)
    for one, other in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (ours, plain)), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
