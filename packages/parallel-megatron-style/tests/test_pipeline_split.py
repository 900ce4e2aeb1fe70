"""Backward matmuls split into input and weight gradients: bit-identical to autograd, deferred by a store."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gangline.model.linear import Linear
from gangline.model.linear_nodes import LinearNode
from gangline.model.weight_grads import call_when_accumulated, defer, is_deferring
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.pipeline.split_linear import split_linear
from gangline_parallel_megatron_style.pipeline.weight_grad_store import WeightGradStore

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def layer(dtype, bias):
    made = Linear(LinearNode(in_features=24, out_features=40, bias=bias)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def gradients(made, microbatches, shape, dtype):
    """Run a few microbatches and return outputs, input gradients and parameter gradients."""
    found = []
    for microbatch in range(microbatches):
        generator = torch.Generator().manual_seed(microbatch)
        x = torch.randn((*shape, 24), generator=generator).to(dtype).requires_grad_()
        y = made(x)
        y.backward(torch.randn(y.shape, generator=generator).to(dtype))
        found += [y.detach(), x.grad]
    return [*found, *(parameter.grad for parameter in made.parameters())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 7)])
def test_split_linear_is_bit_identical_to_autograd(dtype, bias, shape):
    plain, split = layer(dtype, bias), layer(dtype, bias)
    split.matmul = split_linear(Plain(dtype, dtype))
    for one, other in zip(gradients(split, 3, shape, dtype), gradients(plain, 3, shape, dtype), strict=True):
        assert one.dtype == other.dtype
        assert one.equal(other)


def test_bf16_split_linear_matches_linear_of_cast_inputs():
    """Pass float32 inputs to a bfloat16 matmul, and compare with F.linear of the cast inputs."""
    precision, w = Plain(torch.bfloat16, torch.float32), layer(torch.bfloat16, False)
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(6, 24, generator=generator.manual_seed(0)).requires_grad_() for _ in range(2))
    split_linear(precision)(x, w.weight).float().square().sum().backward()
    mine, w.weight.grad = w.weight.grad, None
    F.linear(other.to(torch.bfloat16), w.weight).float().square().sum().backward()
    assert x.grad.equal(other.grad)
    assert mine.equal(w.weight.grad)


def test_weight_gradients_are_computed_when_store_runs():
    made, store = layer(torch.float64, True), WeightGradStore()
    made.matmul = split_linear(Plain(torch.float64, torch.float64))
    x = torch.ones(2, 24, dtype=torch.float64, requires_grad=True)
    y = made(x)
    with store.open(0, 4):
        y.sum().backward()
    assert x.grad is not None
    assert made.weight.grad is None
    assert len(store) == 1
    store.run(0, 3)
    assert made.weight.grad is None
    store.run(0, 4)
    assert made.weight.grad.equal(torch.full((40, 24), 2.0, dtype=torch.float64))
    assert made.bias.grad.equal(torch.full((40,), 2.0, dtype=torch.float64))
    assert not made.weight.grad.requires_grad, "the gradient has a graph of its own, which keeps x alive"
    assert len(store) == 0


def test_frozen_weight_gets_no_gradient():
    made = layer(torch.float32, True)
    made.matmul = split_linear(Plain(torch.float32, torch.float32))
    made.weight.requires_grad_(False)
    made(torch.ones(2, 24)).sum().backward()
    assert made.weight.grad is None
    assert made.bias.grad.equal(torch.full((40,), 2.0))


def test_accumulation_hook_runs_after_deferred_gradient():
    made, store, told = layer(torch.float32, False), WeightGradStore(), []
    made.matmul = split_linear(Plain(torch.float32, torch.float32))
    call_when_accumulated(made.weight, lambda weight: told.append(weight.grad is not None))
    y = made(torch.ones(2, 24))
    with store.open(0, 0):
        y.sum().backward()
    assert told == []
    store.run(0, 0)
    assert told == [True]


def test_defer_keeps_order_and_runs_immediately_without_store():
    store, ran = WeightGradStore(), []
    defer(lambda: ran.append("now"))
    assert not is_deferring()
    for key in ((0, 1), (1, 0)):
        with store.open(*key):
            assert is_deferring()
            defer(lambda key=key: ran.append((key, "a")))
            defer(lambda key=key: ran.append((key, "b")))
    store.run(1, 0)
    store.run(0, 1)
    assert ran == ["now", ((1, 0), "a"), ((1, 0), "b"), ((0, 1), "a"), ((0, 1), "b")]


def test_store_closes_after_error_and_can_be_cleared():
    store = WeightGradStore()

    def fail():
        with store.open(0, 0):
            defer(lambda: None)
            with store.open(0, 1):
                pass

    with pytest.raises(RuntimeError, match="deferred already"):
        fail()
    ran = []
    defer(lambda: ran.append(1))
    assert ran == [1]
    assert len(store) == 1
    store.clear()
    assert len(store) == 0
