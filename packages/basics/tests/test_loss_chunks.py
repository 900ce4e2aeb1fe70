"""`run.loss_chunk`: loss and gradients equal the unchunked loss, with the size of the logits bounded."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gangline.config.defaults import build_default_run
from gangline.mesh import Mesh
from gangline.model.calls import LossCall
from gangline.model.compose import compose_model
from gangline.model.forward_context import Frame, frame
from gangline.model.init import make_whole_model
from gangline_basics.model.config import Tiny
from gangline_basics.model.loss import CrossEntropy
from gangline_testkit.inputs import make_full_batch

B, T, D, V = 2, 9, 6, 37


class Largest(TorchDispatchMode):
    """Dispatch mode that records the element count of the largest tensor created while it is active."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.numbers = max(self.numbers, one.numel())
        return out


def computed(call: LossCall, chunk: int | None, dtype: torch.dtype = torch.float64):
    """Return (loss, gradient of hidden, gradient of the weight, element count of the largest tensor)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(V, (B, T), generator=generator)
    counts = torch.rand(B, T, generator=generator) > 0.3
    with Largest() as largest, frame(Frame(coefficient=0.7)):
        loss = CrossEntropy(call, chunk)(hidden, weight, targets, counts)
        loss.backward(torch.full_like(loss, 0.7))
    return loss.detach(), hidden.grad, weight.grad, largest.numbers


@pytest.mark.parametrize(
    "call", [LossCall(), LossCall(z=0.1), LossCall(soft_cap=1.5), LossCall(z=0.1, soft_cap=1.5)], ids=str
)
@pytest.mark.parametrize("chunk", [1, 5, B * T - 1])
def test_chunked_loss_and_gradients_match_full_loss(call, chunk):
    *whole, most = computed(call, None)
    *parts, least = computed(call, chunk)
    for one, other in zip(whole, parts, strict=True):
        assert other.dtype == one.dtype
        assert (one - other).abs().max() <= 1e-12 * one.abs().max()
    assert most == B * T * V
    assert least == max(chunk * V, V * D)


def test_bfloat16_chunks_accumulate_in_float32():
    *whole, _ = computed(LossCall(z=0.1), None, torch.bfloat16)
    *parts, _ = computed(LossCall(z=0.1), 4, torch.bfloat16)
    for one, other in zip(whole, parts, strict=True):
        assert other.dtype == one.dtype
        assert (one - other).abs().max() <= 0.02 * one.abs().max()


def test_loss_chunk_option_bounds_logits_size():
    losses, logits = [], []
    for chunk in (None, 7):
        run = build_default_run(
            model=Tiny(dim=24, layers=1, heads=2, kv_heads=1, ffn_dim=32, z_loss=0.1),
            run={"loss_chunk": chunk},
            batch={"sequence_length": 16, "global_size": 2},
        )
        tree, plan = compose_model(run)
        model = make_whole_model(tree, plan, seed=1, dtype=torch.float64)
        with Largest() as largest:
            model(make_full_batch(torch.arange(32).view(2, 16))).backward()
        losses.append([p.grad for p in model.parameters()])
        assert (largest.numbers < 32 * 256) == (chunk is not None)
        logits.append(run.parallel.explain(run, Mesh.of({})).ranks[0].bytes["logits"])
    for one, other in zip(*losses, strict=True):
        assert (one - other).abs().max() <= 1e-12 * one.abs().max()
    # Logits, gradient of the logits, a float32 copy of a chunk, and its exponentials: 4 tensors of 4 bytes a logit.
    assert logits[0] - logits[1] == 4 * 4 * (32 - 7) * 256
