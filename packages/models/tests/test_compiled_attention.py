"""Attention of compiled blocks on a GPU: no graph has a tensor of T x T scores or masks.

A CPU kernel replaces FlexAttention, which has no backward pass on the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.config.sections import Recompute
from gangline.config.serial import from_dict
from gangline.model.compose import compose_model
from gangline.model.init import make_whole_model
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model import flex
from gangline_testkit.runs import parse_settings

B, T, VOCAB = 2, 40, 61
SETTINGS = (
    "checkpoint=off",
    f"batch.sequence_length={T}",
    f"model.vocab_size={VOCAB}",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_dim=48",
)
FAMILIES = {
    "gemma2": ("model.dim=32", "model.head_dim=16", "model.window=9", "model.soft_cap=3"),
    "gemma3": ("model.dim=32", "model.head_dim=16", "model.window=9"),
    "gpt_oss": ("model.dim=64", "model.window=9"),
    "ministral": ("model.dim=64", "model.window=9"),
    "olmo3": ("model.dim=64", "model.window=9"),
    "phi3": ("model.dim=96", "model.window=9"),  # width of a head: 24, not a power of two
}


def play_kernel(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux):
    """Compute FlexAttention with plain operators, which autograd differentiates."""
    assert enable_gqa
    assert return_aux.lse
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sizes = *q.shape[:3], k.shape[2]
    rows = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")  # batch, head, query, key
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if score_mod is None else score_mod(scores, *rows)
    scores = scores.masked_fill(~block_mask.mask_mod(*rows), -torch.inf)
    return scores.softmax(-1) @ v, SimpleNamespace(lse=scores.logsumexp(-1))


class Graphs:
    """Compiler of torch.compile that runs graphs as they are, and refuses tensors whose last two sizes are T."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        self.count += 1
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            shape = value.shape if isinstance(value, Tensor) else ()
            assert shape[-2:] != (T, T), f"{node.target} makes a tensor {tuple(shape)}"
        return graph.forward


def make_model(name: str) -> nn.Module:
    settings = (f"model={name}", *SETTINGS, *FAMILIES[name])
    return make_whole_model(*compose_model(from_dict(parse_settings(settings))), seed=0, dtype=torch.float32)


def compute(model: nn.Module, batch: Batch) -> list[Tensor]:
    loss = model(batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize(("name", "documents"), [*((name, 3) for name in FAMILIES), ("gemma2", 1)])
def test_compiled_attention_on_gpu_has_no_square_tensor(name, documents, random_batch, monkeypatch):
    batch, model = random_batch(B, T, VOCAB, documents), make_model(name)
    wanted = compute(model, batch)
    monkeypatch.setattr(flex, "DEVICES", ("cpu",))
    monkeypatch.setattr(flex, "_make_kernel", lambda: play_kernel)
    make_mask = flex.make_block_mask
    monkeypatch.setattr(flex, "make_block_mask", lambda *of: make_mask(*of, compiled=False))
    uncompiled = compute(model, batch)
    graphs, compile_function = Graphs(), torch.compile
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda function: compile_function(function, backend=graphs))
    finish = make_finish(Recompute.none, compile=True)
    for number, block in enumerate(model.blocks):
        finish(block, f"blocks.{number}")
    compiled = compute(model, batch)
    assert graphs.count <= 3 * 2  # three graphs a block: before, around and after the call of attention
    for plain, eager, found in zip(wanted, uncompiled, compiled, strict=True):
        assert (eager - plain).norm() <= 1e-5 * plain.norm()
        assert (found - eager).norm() <= 1e-6 * eager.norm()
