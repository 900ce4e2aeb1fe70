"""Gradient compression: codecs between floating-point numbers and bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gangline_basics.gradients.config import CHUNK

BITS = 8  # number of bits per byte


class GradCodec(ABC):
    """Codec between rows of floating-point numbers and rows of bytes. `multiple` must divide the length of a row."""

    multiple: int
    feedback: bool  # error feedback: the encoding error is added to the gradients of the next step

    @abstractmethod
    def encode(self, x_nm: Tensor) -> Tensor:
        """Encode numbers (n, m) as bytes (n, k), where k depends only on m."""

    @abstractmethod
    def decode(self, bytes_nk: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode bytes (n, k) to numbers (n, m), bitwise equal on every rank for the same bytes."""


class Bfloat16(GradCodec):
    """Codec that rounds to bfloat16."""

    multiple, feedback = 1, False

    def encode(self, x_nm: Tensor) -> Tensor:
        return x_nm.to(torch.bfloat16).view(torch.uint8)

    def decode(self, bytes_nk: Tensor, dtype: torch.dtype) -> Tensor:
        return bytes_nk.view(torch.bfloat16).to(dtype)


class Signs(GradCodec):
    """Codec that stores the sign of each element, and the mean magnitude of each chunk of 256 elements in float32.

    Source: Tang et al., arXiv 2102.02888, section 3.1, which uses one scale for the complete tensor.
    """

    multiple, feedback = CHUNK, True

    def encode(self, x_nm: Tensor) -> Tensor:
        n = len(x_nm)
        chunks = x_nm.float().view(n, -1, CHUNK)
        scales = chunks.abs().mean(-1)
        places = torch.arange(BITS, device=x_nm.device, dtype=torch.uint8)
        signs = (chunks >= 0).view(n, -1, BITS).to(torch.uint8)
        packed = (signs << places).sum(-1, dtype=torch.uint8)
        return torch.cat((scales.view(torch.uint8), packed), 1)

    def decode(self, bytes_nk: Tensor, dtype: torch.dtype) -> Tensor:
        n, k = bytes_nk.shape
        count = k // (4 + CHUNK // BITS)
        scales = bytes_nk[:, : 4 * count].contiguous().view(torch.float32)
        places = torch.arange(BITS, device=bytes_nk.device, dtype=torch.uint8)
        bits = (bytes_nk[:, 4 * count :, None] >> places) & 1
        signs = bits.view(n, count, CHUNK).to(dtype).mul_(2).sub_(1)
        return signs.mul_(scales[..., None]).view(n, -1)
