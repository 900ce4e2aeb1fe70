"""Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864, section 3.2.2), with Llama 3.1's scaling.

Feature i of the first half of a head is rotated with feature i of the second half, as Hugging Face lays them out.
Nothing is kept in buffers: angles follow from the positions of the batch.

B batch, T tokens, H heads, C width of a head, F = C/2 frequencies
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from gangline.model.recall import Recall
from gangline.model.tree import Rope

_recall = Recall()  # all layers of a forward pass rotate by the same angles


def frequencies(rope: Rope, head_dim: int) -> tuple[float, ...]:
    """Radians per position of each of the head_dim/2 pairs: theta^(-2i/C).

    With scaling, wavelengths beyond original_max_position / low_freq_factor are stretched by `factor`, those
    below original_max_position / high_freq_factor stay, and between the two the rate is interpolated (`apply_scaling`
    in Meta's reference code for Llama 3.1).
    """
    plain = [rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    scaling = rope.scaling
    if scaling is None:
        return tuple(plain)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    scaled = []
    for rate in plain:
        turns = scaling.original_max_position * rate / (2 * math.pi)  # over the original context
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append(keep * rate + (1 - keep) * rate / scaling.factor)
    return tuple(scaled)


def angles(position_BT: Tensor, rates: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (B, 1, T, F) in `dtype`, of the angle of every pair at every position."""
    made = torch.tensor if torch.compiler.is_compiling() else _kept
    rate_F = made(rates, dtype=dtype, device=position_BT.device)
    angle_B1TF = position_BT[:, None, :, None].to(dtype) * rate_F
    return angle_B1TF.cos(), angle_B1TF.sin()


@lru_cache(maxsize=64)
def _kept(rates: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rates on the device, copied there once: a copy of numbers of the host waits for all that the device has to do."""
    with torch.inference_mode(False):
        return torch.tensor(rates, dtype=dtype, device=device)


def rotate(x_BHTC: Tensor, cos_B1TF: Tensor, sin_B1TF: Tensor) -> Tensor:
    """Each pair of features turned by its angle; computed in the dtype of the angles."""
    a, b = x_BHTC.to(cos_B1TF.dtype).chunk(2, dim=-1)
    turned = torch.cat((a * cos_B1TF - b * sin_B1TF, b * cos_B1TF + a * sin_B1TF), dim=-1)
    return turned.to(x_BHTC.dtype)


def rotated(q: Tensor, k: Tensor, position_BT: Tensor, rates: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """q (B, H, T, C) and k (B, K, T, C) rotated to their positions, `rates` as `frequencies` gives them.

    Angles are in float32, for float64 input in float64.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    cos, sin = _recall((rates, dtype), position_BT, lambda: angles(position_BT, rates, dtype))
    return rotate(q, cos, sin), rotate(k, cos, sin)
