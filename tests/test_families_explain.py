"""What is explained of families: parameters, and what a block keeps, against the modules themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import pytest
import torch
from test_families import FAMILIES, SIZES
from torch import Tensor, nn

from gangline.config import Run, from_dict
from gangline.explain import of_angles
from gangline.mesh import Mesh
from gangline.model import construct, parameter_count, parameter_shapes
from gangline.testing.inputs import whole_sequences
from gangline.testing.runs import SMALL, content
from gangline_parallel_megatron_style.cost import activations
from gangline_parallel_megatron_style.cost.case import Case

B, T = 2, 16
# On a CPU windows are masks and soft caps scores that are kept; what is counted is the fused kernels of a GPU.
FUSED = {"phi3": ("model.window=null",), "gemma2": ("model.soft_cap=null",)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run_of(family: str, precision: str) -> Run:
    plain = [word for word in SMALL if not word.startswith(("model=", "model.kv_heads", "model.qk_norm"))]
    batch = (f"batch.micro_size={B}", "parallel=tp", f"precision={precision}")
    return from_dict(content([*plain, f"model={family}", *SIZES, *FAMILIES[family], *FUSED.get(family, ()), *batch]))


def kept(weights: Iterable[Tensor], forward: Callable[[], object]) -> int:
    """Bytes that autograd holds on to, weights not counted; each piece of memory once."""
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    found: dict[int, int] = {}
    alive: list[object] = []

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        alive.append(forward())
    return sum(found.values())


def built(case: Case, precision: str) -> nn.Module:
    model = construct(case.tree).to(DTYPES[precision]).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_counts_is_what_the_modules_have(family):
    case = Case.of(run_of(family, "fp32"), Mesh.of({}))
    model = construct(case.tree)
    assert parameter_shapes(case.tree) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert parameter_count(case.tree) == sum(prod(p.shape) for p in model.parameters())


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_what_the_closed_form_says(family, precision):
    case = Case.of(run_of(family, precision), Mesh.of({}))
    model = built(case, precision)
    batch = whole_sequences(torch.arange(B * T).view(B, T) % 61)
    hidden = model.embed(batch).detach().requires_grad_()
    sizes = activations.sizes_of(case, gpu=False)
    found = kept([*model.parameters(), batch.position], lambda: model.blocks[1](hidden, batch))
    told = activations.of_block(case, 1, sizes) + of_angles([case.blocks[1]], sizes)
    if family == "gpt2" and precision == "bf16":
        found += 2 * 2 * B * T * 2  # a CPU keeps mean and deviation of each LayerNorm in bfloat16, a GPU in float32
    assert found == told
