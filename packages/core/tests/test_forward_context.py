"""Forward context of modules: losses, metrics, random draws, with and without a frame and recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gangline.model import forward_context
from gangline.model.forward_context import (
    Collected,
    Frame,
    draw,
    emit_loss,
    emit_metric,
    emit_under,
    frame,
    gather_heads,
    sum_over_sequence,
)
from gangline.model.weight_grads import defer_gradients, is_deferring


class Noisy(nn.Module):
    """Module that drops features at random, emits a loss of its output, and emits its number of tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, dim, dtype=torch.float64))

    def forward(self, hidden):
        kept = draw(hidden, "drop") < 0.7
        hidden = hidden * self.weight * kept
        hidden = emit_loss(hidden, (hidden**2).sum() * 0.1, "size")
        emit_metric("tokens", torch.tensor(float(hidden.shape[0] * hidden.shape[1])))
        return hidden


@pytest.fixture
def hidden():
    return torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_context_functions_without_frame_change_nothing(hidden):
    term = torch.tensor(3.0)
    assert emit_loss(hidden, term) is hidden
    assert emit_metric("x", term) is None
    assert sum_over_sequence(hidden) is hidden
    assert gather_heads(hidden) is hidden


def step(module, hidden, *, recompute: bool, microbatches: int = 1):
    """Run a step with the objective (sum(out) + emitted losses) / 8; return the gradient and the collected values."""
    collected = Collected()
    module.weight.grad = None
    for number in range(microbatches):
        surroundings = Frame(microbatch=number, seed=1, step=2, coefficient=1 / 8, collected=collected)
        with frame(surroundings), emit_under("blocks.3"):
            out = checkpoint(module, hidden, use_reentrant=False) if recompute else module(hidden)
            (out.sum() / 8).backward()
    return module.weight.grad, collected


@pytest.mark.parametrize("recompute", [False, True])
def test_emitted_loss_is_scaled_by_coefficient(hidden, recompute):
    module = Noisy(4)
    gradient, collected = step(module, hidden, recompute=recompute)
    weight = module.weight.detach().clone().requires_grad_()
    with frame(Frame(seed=1, step=2)), emit_under("blocks.3"):
        out = hidden * weight * (draw(hidden, "drop") < 0.7)
    expected = (out.sum() + (out**2).sum() * 0.1) / 8
    expected.backward()
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-13, atol=0)
    assert collected.losses.keys() == {(0, "blocks.3", "size")}
    torch.testing.assert_close(collected.losses[0, "blocks.3", "size"], (out.detach() ** 2).sum() * 0.1)
    assert not collected.losses[0, "blocks.3", "size"].requires_grad


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_tokens_are_counted_once(hidden, recompute):
    _, collected = step(Noisy(4), hidden, recompute=recompute, microbatches=3)
    values = {key: (value.item(), reduce) for key, (value, reduce) in collected.metrics.items()}
    assert values == {(n, "blocks.3", "tokens"): (10.0, "sum") for n in range(3)}


def test_recomputation_draws_same_random_numbers(hidden):
    module = Noisy(4)
    plain, _ = step(module, hidden, recompute=False)
    again, _ = step(module, hidden, recompute=True)
    assert torch.equal(plain, again)


def test_coefficient_set_before_backward_is_used(hidden):
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    surroundings = Frame(coefficient=1.0)
    with frame(surroundings):
        out = emit_loss(hidden * 0 + weight * 0, weight.sum())
    surroundings.coefficient = 0.25
    out.sum().backward()
    assert weight.grad.tolist() == [0.25] * 4


def test_metrics_outside_frame_are_not_collected(hidden):
    collected = Collected()
    with frame(Frame(collected=collected)):
        with emit_under("blocks.0"), emit_under("blocks.0.router"):
            emit_metric("x", torch.tensor(1.0), "max")
        emit_metric("y", torch.tensor(2.0))
    emit_metric("z", torch.tensor(3.0))
    assert set(collected.metrics) == {(0, "blocks.0.router", "x"), (0, "", "y")}


class TestDraw:
    def keyed(self, like, *, site="drop", seed=0, step=0, sample=None, position=None, first_feature=0):
        B, T, _ = like.shape
        sample = torch.arange(B)[:, None].expand(B, T) if sample is None else sample
        with frame(Frame(seed=seed, step=step, sample=sample, position=position)):
            return draw(like, site, first_feature)

    def test_is_uniform(self):
        drawn = draw(torch.empty(8, 64, 128), "x").double()
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert drawn.mean().item() == pytest.approx(0.5, abs=4 / (12 * 65536) ** 0.5)
        assert drawn.var().item() == pytest.approx(1 / 12, rel=0.02)
        for neighbours in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1]), (drawn[..., 1:], drawn[..., :-1])):
            pair = torch.stack([x.flatten() for x in neighbours])
            assert abs(torch.corrcoef(pair)[0, 1]) < 0.02

    def test_shard_matches_slice_of_full_draw(self):
        whole = self.keyed(torch.empty(4, 6, 8))
        sample = torch.arange(4)[:, None].expand(4, 6)
        position = torch.arange(6).expand(4, 6)
        assert torch.equal(self.keyed(torch.empty(2, 6, 8), sample=sample[2:]), whole[2:])
        part = self.keyed(torch.empty(4, 3, 8), sample=sample[:, 3:], position=position[:, 3:])
        assert torch.equal(part, whole[:, 3:])
        assert torch.equal(self.keyed(torch.empty(4, 6, 3), first_feature=5), whole[..., 5:])

    def test_every_key_field_changes_the_draw(self):
        like = torch.empty(2, 3, 4)
        drawn = [
            self.keyed(like),
            self.keyed(like, site="jitter"),
            self.keyed(like, seed=1),
            self.keyed(like, step=1),
            self.keyed(like, sample=torch.full((2, 3), 7)),
            self.keyed(like, position=torch.full((2, 3), 9)),
            self.keyed(like, first_feature=4),
        ]
        with emit_under("blocks.1"):
            drawn.append(self.keyed(like))
        for i, one in enumerate(drawn):
            assert not any(torch.equal(one, other) for other in drawn[:i])

    def test_documents_draw_different_numbers(self):
        like = torch.empty(1, 4, 3)
        surroundings = Frame(document=torch.tensor([[0, 0, 1, 1]]), position=torch.tensor([[0, 1, 0, 1]]))
        with frame(surroundings):
            drawn = draw(like, "x")
        assert not torch.equal(drawn[:, :2], drawn[:, 2:])


def test_sum_over_sequence_calls_frame_function(hidden):
    with frame(Frame(over_sequence=lambda x: x * 2)):
        assert torch.equal(sum_over_sequence(hidden), hidden * 2)


def test_a_weight_gradient_is_computed_now_or_deferred():
    weight, kept = nn.Parameter(torch.ones(2)), []

    def compute():
        return weight * 3  # its graph must not outlive the backward pass

    assert forward_context.return_weight_gradient(weight, compute).equal(torch.full((2,), 3.0))
    with defer_gradients(kept.append):
        assert is_deferring()
        assert forward_context.return_weight_gradient(weight, compute) is None
        with pytest.raises(RuntimeError, match="already"), defer_gradients(kept.append):
            pass
    assert not is_deferring()
    assert weight.grad is None
    (found,) = kept
    for times in (1.0, 2.0):
        found()
        assert weight.grad.equal(torch.full((2,), 3.0 * times))
        assert not weight.grad.requires_grad
    assert forward_context.return_weight_gradient(weight, compute) is not None


def test_overlap_point_acts_only_within_take_turns():
    said = []
    forward_context.overlap_point()
    with forward_context.take_turns(lambda: said.append("other")):
        forward_context.overlap_point()
    forward_context.overlap_point()
    assert said == ["other"]


def test_swap_exchanges_frame_and_path():
    frame = forward_context.Frame(microbatch=3)
    with forward_context.frame(frame), forward_context.emit_under("blocks.1"):
        left = forward_context.swap()
        assert left == (frame, "blocks.1")
        assert forward_context.swap(left) == (None, "")
        assert forward_context.swap() == left
