"""Mixture-of-experts layer: comparison with a reference per token, dtypes, capacity, edge cases."""

from __future__ import annotations

import contextlib
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.model import forward_context
from gangline.model.build import construct
from gangline.model.forward_context import Collected, Frame
from gangline.model.linear_nodes import LinearNode
from gangline.model.weight_grads import defer_gradients
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import FeedForwardNode
from gangline_basics.model.gating import Gating
from gangline_basics.parallel.prepare import set_matmuls
from gangline_basics.precision.plain import Plain
from gangline_moe.config import MoeOptions
from gangline_moe.edit import make_layer_node
from gangline_moe.matmuls import PlainMatmuls, PrecisionMatmuls, choose_matmuls
from gangline_moe.routers.config import Biased, ExpertChoice, Grouped, RouterConfig, Sigmoid, Softmax

D, H = 12, 10


BIASED = dict.fromkeys(("w_gate", "w_up", "w_down"), LinearNode(bias=True))
BOUNDED = FeedForwardNode(dim=D, ffn_dim=20, gating=Gating(slope=1.7, limit=0.6, offset=1.0), **BIASED)


def layer(router: RouterConfig | None = None, dtype=torch.float64, seed=0, dim=D, hidden=H, dense=None, **options):
    """Return a layer with random weights."""
    given = MoeOptions(ffn_dim=hidden, router=router or Softmax(), **options)
    node = make_layer_node(dense or FeedForwardNode(dim=dim, ffn_dim=20), given)
    module = construct(node).to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for array in module.state_dict().values():
        array.copy_(torch.randn(array.shape, generator=generator, dtype=torch.float64) * 0.4)
    if module.router.share is not None:
        module.router.share.fill_(1 / given.experts)
    return module


def x_of(tokens=7, sequences=2, dtype=torch.float64, dim=D):
    return torch.randn(sequences, tokens, dim, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(
        dtype
    )


def one_by_one(module, x: Tensor, activation=F.silu) -> Tensor:
    """Compute the output token by token and expert by expert."""
    choice = module.router(x)
    flat, E = x.flatten(0, 1), len(module.experts.w_gate.weight)
    rows = []
    for n, token in enumerate(flat):
        y = torch.zeros_like(token)
        for expert, weight in zip(choice.expert_Nk[n].tolist(), choice.weight_Nk[n], strict=True):
            if expert < E:
                gate, up = module.experts.w_gate.weight[expert] @ token, module.experts.w_up.weight[expert] @ token
                y = y + weight.to(y.dtype) * (module.experts.w_down.weight[expert] @ (activation(gate) * up))
        rows.append(y)
    y = torch.stack(rows).view_as(x)
    return y if module.shared is None else y + module.shared(x)


ROUTERS = [
    Softmax(),
    Softmax(renormalise=False),
    Sigmoid(scale=2.0),
    Sigmoid(renormalise=False),
    Grouped(groups=4, top_groups=2),
    ExpertChoice(),
]


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_layer_matches_per_token_reference(router):
    compare_with_one_by_one(layer(router, shared=1), one_by_one)


def test_experts_with_gelu_match_reference():
    dense = FeedForwardNode(dim=D, ffn_dim=20, gating=Gating(activation="gelu_tanh"))
    compare_with_one_by_one(layer(dense=dense), partial(one_by_one, activation=partial(F.gelu, approximate="tanh")))


def bounded_one_by_one(module, x: Tensor) -> Tensor:
    """Compute the output token by token, with biases and clamped gating, with torch operators only."""
    choice, experts, rows = module.router(x), module.experts, []
    for n, token in enumerate(x.flatten(0, 1)):
        y = torch.zeros_like(token)
        for e, weight in zip(choice.expert_Nk[n].tolist(), choice.weight_Nk[n], strict=True):
            gate, up = (w.weight[e] @ token + w.bias[e] for w in (experts.w_gate, experts.w_up))
            gate, up = gate.clamp(max=0.6), up.clamp(-0.6, 0.6)
            inner = gate * torch.sigmoid(1.7 * gate) * (up + 1)
            y = y + weight * (experts.w_down.weight[e] @ inner + experts.w_down.bias[e])
        rows.append(y)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("kind", ["together", "matmul by matmul"])
def test_biased_and_clamped_experts_match_reference(kind, monkeypatch):
    module = layer(Biased(), dense=BOUNDED, experts=5)
    if kind != "together":  # as with an edit that wraps one of the matmuls
        monkeypatch.setattr("gangline_moe.experts.Stack", type("Other", (), {}))
    compare_with_one_by_one(module, bounded_one_by_one)


def compare_with_one_by_one(module, formula):
    """Compare outputs and the gradients of weights, biases and input."""
    x = x_of().requires_grad_()
    got, want = module(x), formula(module, x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(got.shape, generator=generator, dtype=got.dtype)
    given = [x, *module.parameters()]
    for one, other in zip(torch.autograd.grad(got, given, grad), torch.autograd.grad(want, given, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("kind", ["grouped", "by the precision"])
def test_grouped_matmul_matches_reference_in_every_dtype(dtype, bound, kind):
    """Check experts with no rows, one row and many rows, and a batch without rows."""
    matmuls = PlainMatmuls() if kind == "grouped" else PrecisionMatmuls(Plain(dtype, torch.float32))
    generator = torch.Generator().manual_seed(0)
    for counts in ([0, 5, 1, 0, 9], [0, 0, 0, 0, 0], [15, 0, 0, 0, 0]):
        bounds = torch.tensor([0, *counts]).cumsum(0)
        x, y = (torch.randn(sum(counts), n, generator=generator, dtype=torch.float64) for n in (16, 8))
        w = torch.randn(5, 8, 16, generator=generator, dtype=torch.float64)
        for name, given in (("multiply_rows", (x, w)), ("compute_grad_x", (y, w)), ("compute_grad_w", (y, x))):
            want = getattr(PlainMatmuls(), name)(*given, bounds)
            got = getattr(matmuls, name)(*(a.to(dtype) for a in given), bounds)
            assert got.shape == want.shape
            scale = max(1.0, float(want.abs().max()) if want.numel() else 0.0)
            torch.testing.assert_close(got.double(), want, rtol=0, atol=bound * scale)


class Halved(Plain):
    """Precision whose matmuls also halve their input."""

    def linear(self, x, w, b=None):
        return super().linear(x / 2, w, b)

    def compute_grad_x(self, dy, w):
        return super().compute_grad_x(dy, w) / 2

    def compute_grad_w(self, dy, x):
        return super().compute_grad_w(dy, x) / 2


def test_experts_use_matmul_of_custom_precision():
    """Compare with halved weights: a matmul of half the input equals a matmul with half the matrix."""
    precision = Halved(torch.float64, torch.float64)
    assert type(choose_matmuls(Plain(torch.bfloat16, torch.float32))) is PlainMatmuls
    asked, halved, x = layer(), layer(), x_of().requires_grad_()
    set_matmuls(asked.experts, Plan("embed", "blocks", "head", 1), precision)
    with torch.no_grad():
        for weight in halved.experts.parameters():
            weight /= 2
    got, want = (torch.autograd.grad(m(x).square().sum(), [x, *m.experts.parameters()]) for m in (asked, halved))
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(one, other / 2 if index else other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("tokens", [1, 2])
def test_short_sequences_match_reference(router, tokens):
    module, x = layer(router), x_of(tokens, 1)
    torch.testing.assert_close(module(x), one_by_one(module, x), rtol=1e-12, atol=1e-13)


def test_all_tokens_on_one_expert_match_reference():
    module, x = layer(Softmax(global_aux_loss=0), top_k=1), x_of()
    with torch.no_grad():
        module.router.gate.weight.zero_()
    module.router.register_buffer("bias", torch.zeros(8).index_fill_(0, torch.tensor([3]), 9.0))
    y = module(x)
    torch.testing.assert_close(y, one_by_one(module, x), rtol=1e-12, atol=1e-13)
    y.sum().backward()
    idle = [e for e in range(8) if e != 3]
    assert module.experts.w_up.weight.grad[3].any()
    assert not module.experts.w_up.weight.grad[idle].any()


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_nan_router_weight_gives_nonfinite_step(router):
    """Check that expert numbers stay in range and the step is non-finite, so that the strategy skips the update."""
    module, x = layer(router), x_of()
    with torch.no_grad():
        module.router.gate.weight[2, 1] = math.nan
    y = module(x.requires_grad_())
    y.sum().backward()
    finite = [torch.isfinite(y).all(), *(torch.isfinite(p.grad).all() for p in module.parameters())]
    assert not all(finite)


def collected(module, x, **surroundings):
    found = Collected()
    with forward_context.frame(Frame(collected=found, **surroundings)):
        y = module(x)
    metrics = {name: value for (_, _, name), (value, _) in found.metrics.items()}
    return y, {**metrics, **{name: value for (_, _, name), value in found.losses.items()}}


def test_capacity_drops_excess_tokens_and_logs_share():
    module, x = layer(capacity_factor=0.5, top_k=1), x_of(16)
    y, told = collected(module, x)
    choice = module.router(x)
    limit = math.ceil(0.5 * 32 / 8)
    seen = [0] * 8
    want = torch.zeros_like(x).flatten(0, 1)
    full = one_by_one(module, x).flatten(0, 1)
    for n, (expert,) in enumerate(choice.expert_Nk.tolist()):
        seen[expert] += 1
        if seen[expert] <= limit:
            want[n] = full[n]
    torch.testing.assert_close(y.flatten(0, 1), want)
    dropped = sum(max(0, count - limit) for count in seen)
    assert dropped
    assert float(told["dropped"]) == pytest.approx(dropped / 32)
    assert told["load"].tolist() == seen


def test_ample_capacity_drops_no_tokens():
    kept, plain, x = layer(capacity_factor=8.0), layer(), x_of()
    assert torch.equal(kept(x), plain(x))


def test_layer_saves_bounded_bytes_for_backward():
    """Check that a layer saves its rows and two matmul outputs, and no copy of the tokens."""
    module, x = layer(dtype=torch.float32), x_of(64, dtype=torch.float32).requires_grad_()
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = sum(p.untyped_storage().nbytes() for p in module.parameters())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    pairs, tokens = 2 * 64 * 2, 2 * 64
    rows = pairs * (2 * D + 2 * H) * 4  # input rows, output rows, two matmul outputs
    of_router = tokens * (2 * 8 * 4 + 2 * (4 + 8) + 4 * 4) + tokens * D * 4
    assert sum(kept.values()) - own <= rows + of_router


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_deferred_expert_gradients_are_bit_identical(dtype):
    """Check that deferred gradients have the same bits and belong to the same parameters."""

    def gradients(later: bool) -> dict[str, Tensor | None]:
        module, kept = layer(dtype=dtype, dim=16, hidden=16), []
        x = x_of(dtype=dtype, dim=16).requires_grad_()
        y = module(x)
        with defer_gradients(kept.append) if later else contextlib.nullcontext():
            y.sum().backward()
        assert len(kept) == 3 * later
        assert all((weight.grad is None) == later for weight in module.experts.parameters())
        for compute in kept:
            compute()
        return {"x": x.grad, **{name: weight.grad for name, weight in module.named_parameters()}}

    now, later = gradients(False), gradients(True)
    assert {f"experts.{name}.weight" for name in ("w_gate", "w_up", "w_down")} < now.keys() == later.keys()
    for name, want in now.items():
        assert later[name].equal(want), name
