"""`run.recompute` and `run.compile`: results are unchanged; only time and memory differ."""

import pytest
import torch
from torch import nn

from gangline.config.defaults import build_default_run
from gangline.config.sections import Recompute
from gangline.model import forward_context
from gangline.model.compose import compose_model
from gangline.model.init import make_whole_model
from gangline.train.recompute_and_compile import make_finish
from gangline_testkit.inputs import make_microbatch


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, hidden, batch):
        return torch.tanh(hidden @ self.weight)


class Block(Plain):
    """Block that counts its calls, emits a loss and a metric, and drops features by a layout-invariant draw."""

    calls = 0

    def forward(self, hidden, batch):
        self.calls += 1
        kept = forward_context.draw(hidden, "dropout") > 0.5
        hidden = super().forward(hidden, batch) * kept
        forward_context.emit_metric("kept", kept.sum())
        return forward_context.emit_loss(hidden, hidden.pow(2).sum())


def run(recompute, compile=False):
    block = Block()
    make_finish(recompute, compile)(block, "blocks.0")
    collected = forward_context.Collected()
    hidden = torch.ones(2, 3, 8, dtype=torch.float64, requires_grad=True)
    with forward_context.frame(
        forward_context.Frame(microbatch=4, seed=1, step=2, coefficient=0.5, collected=collected)
    ):
        loss = block(hidden, None).sum()
        loss.backward()
    return block, loss.detach(), hidden.grad, collected


def test_recomputed_blocks_match_and_count_metrics_once():
    plain, loss, grad, kept = run(Recompute.none)
    again, loss2, grad2, kept2 = run(Recompute.full)
    assert (plain.calls, again.calls) == (1, 2)
    assert torch.equal(loss, loss2)
    assert torch.equal(grad, grad2)
    assert torch.equal(plain.weight.grad, again.weight.grad)
    assert list(kept.metrics) == list(kept2.metrics) == [(4, "blocks.0", "kept")]
    assert list(kept2.losses) == [(4, "blocks.0", "loss")]


def test_every_second_block_is_recomputed():
    calls = []
    for index in range(4):
        block = Block()
        make_finish(Recompute.full, False, every=2)(block, f"blocks.{index}")
        block(torch.ones(1, 2, 8, dtype=torch.float64, requires_grad=True), None).sum().backward()
        calls.append(block.calls)
    assert calls == [2, 1, 2, 1]


class Wrapped(nn.Module):
    """Module with a parameter that replaces the function at a seam."""

    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(()))

    def forward(self, q, k, v, document, position):
        return self.function(q * self.scale, k, v, document, position)


@pytest.mark.parametrize("put", [lambda function: function, Wrapped])
def test_selective_recomputes_the_attention_alone(put):
    run = build_default_run(model="tiny")
    tree, plan = compose_model(run)
    batch = make_microbatch([0, 1], 0, 16, 256, "documents")
    losses, gradients, calls = [], [], []

    def counted(attention, under):
        return lambda *inputs: calls.append(under) or attention(*inputs)

    for recompute in (Recompute.none, Recompute.selective):
        model = make_whole_model(tree, plan, seed=0)
        for block in model.blocks:
            block.attention.attention = put(counted(block.attention.attention, recompute))
        for index, block in enumerate(model.blocks):
            make_finish(recompute, False, seams=plan.seams)(block, f"blocks.{index}")
        loss = model(batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    layers = len(model.blocks)
    assert (calls.count(Recompute.none), calls.count(Recompute.selective)) == (layers, 2 * layers)
    assert torch.equal(*losses)
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_recompute_keeps_parameter_names():
    block, *_ = run(Recompute.full)
    assert [name for name, _ in block.named_parameters()] == ["weight"]


@pytest.mark.nightly
def test_compiled_blocks_match_uncompiled_gradients():
    results = []
    for recompute in Recompute:
        for compile in (False, True):
            block = Plain()
            make_finish(recompute, compile)(block, "blocks.0")
            hidden = torch.ones(2, 3, 8, dtype=torch.float64, requires_grad=True)
            block(hidden, None).sum().backward()
            results.append((hidden.grad, block.weight.grad))
    for grad, weight_grad in results[1:]:
        torch.testing.assert_close(grad, results[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weight_grad, results[0][1], rtol=1e-12, atol=1e-12)


class Penalised(nn.Module):
    def forward(self, hidden, batch):
        return forward_context.emit_loss(2 * hidden, hidden.square().sum())


@pytest.mark.nightly
def test_compiled_block_uses_coefficient_of_backward():
    """Set the coefficient after the forward pass, because the tokens of the complete step are known only then."""
    block, hidden = Penalised(), torch.randn(2, 3, 4, requires_grad=True)
    make_finish(Recompute.none, True)(block, "blocks.0")
    for coefficient in (0.5, 0.25):
        hidden.grad = None
        with forward_context.frame(forward_context.Frame()) as frame:
            y = block(hidden, None)
            frame.coefficient = coefficient
            y.sum().backward()
        torch.testing.assert_close(hidden.grad, 2 + coefficient * 2 * hidden.detach())
