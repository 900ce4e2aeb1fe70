"""Packed weights for matmuls with a few tokens at a time on a CPU.

oneDNN packs a matrix once, for a given number of input rows. Its matmul with the packed matrix is faster than MKL's
matmul with the unpacked matrix. Measured with 8 rows on one core of an AMD EPYC, float32, GB/s of the matrix: 4 to 7
unpacked, 8 to 11 packed. A packed matmul takes some 12 us to start; a small unpacked matmul finishes in that time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gangline.model.linear import Linear
from gangline_basics.model.head import Head

LEAST_BYTES = 1 << 20  # minimum size of a matrix to pack


@contextmanager
def pack_weights(model: nn.Module, rows: int) -> Iterator[None]:
    """Use packed copies of large float32 matrices in linears and head, for `rows` input rows, inside the `with` block.

    Without oneDNN for an x86 processor, or for matrices that are not on the CPU, the model is unchanged.
    """
    originals: list[tuple[Linear | Head, Callable[..., Tensor]]] = []
    try:
        for module in model.modules() if is_available() else ():
            if isinstance(module, Linear | Head) and _packs(module):
                originals.append((module, module.matmul))
                module.matmul = partial(_multiply, _pack(module.weight, rows))
        yield
    finally:
        for module, matmul in originals:
            module.matmul = matmul


def is_available() -> bool:
    """Return whether this torch packs matrices for this processor."""
    known = all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    return known and torch.backends.mkldnn.is_available() and platform.machine() == "x86_64"


def _packs(module: Linear | Head) -> bool:
    weight = module.weight
    if weight.nbytes < LEAST_BYTES:
        return False
    own = isinstance(module, Head) or module.matrix is weight  # otherwise the weight is wrapped
    return own and weight.device.type == "cpu" and weight.dtype == torch.float32


@torch.no_grad()
def _pack(weight: Tensor, rows: int) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)


def _multiply(packed: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
