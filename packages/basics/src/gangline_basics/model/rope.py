"""Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864, section 3.2.2); `rope_rates` computes rates.

Feature i of the first half of the rotated features is paired with feature i of the second half, as in Hugging Face.
No buffers: angles follow from the positions of the batch.

B batch, T tokens, H heads, C width of a head, F frequencies: the first 2F features of a head are rotated
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gangline_basics.model.last_value_cache import LastValueCache


@lru_cache(maxsize=64)
def _get_angle_cache(rates: tuple[float, ...], magnitude: float) -> LastValueCache:
    """Return the cache shared by all layers of a forward pass that rotate by the same angles."""
    return LastValueCache()


def compute_angles(
    position_BT: Tensor, rates: tuple[float, ...], dtype: torch.dtype, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin, each (B, 1, T, F) in `dtype`, of each pair's angle at every position, times `magnitude`."""
    copy_rates = torch.tensor if torch.compiler.is_compiling() else _copy_rates
    rate_F = copy_rates(rates, dtype=dtype, device=position_BT.device)
    angle_B1TF = position_BT[:, None, :, None].to(dtype) * rate_F
    cos, sin = angle_B1TF.cos(), angle_B1TF.sin()
    return (cos, sin) if magnitude == 1.0 else (cos.mul_(magnitude), sin.mul_(magnitude))


@lru_cache(maxsize=64)
def _copy_rates(rates: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy the rates to the device once, because a copy from the host waits until the device's queue is empty."""
    with torch.inference_mode(False):
        return torch.tensor(rates, dtype=dtype, device=device)


def rotate(x_BHTC: Tensor, cos_B1TF: Tensor, sin_B1TF: Tensor) -> Tensor:
    """Rotate each pair of features by its angle, in the dtype of the angles."""
    width = 2 * cos_B1TF.shape[-1]
    a, b = x_BHTC[..., :width].to(cos_B1TF.dtype).chunk(2, dim=-1)
    turned = (a * cos_B1TF - b * sin_B1TF, b * cos_B1TF + a * sin_B1TF)
    rest = () if width == x_BHTC.shape[-1] else (x_BHTC[..., width:].to(cos_B1TF.dtype),)
    return torch.cat((*turned, *rest), dim=-1).to(x_BHTC.dtype)


def rotate_pair(
    q: Tensor, k: Tensor, position_BT: Tensor, rates: tuple[float, ...], magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return q (B, H, T, C) and k (B, K, T, C) rotated to their positions, with `rates` of `compute_frequencies`.

    Angles are in float32, or in float64 for float64 input.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    if torch.compiler.is_compiling():
        cos, sin = compute_angles(position_BT, rates, dtype, magnitude)
    else:
        cache = _get_angle_cache(rates, magnitude)
        cos, sin = cache(dtype, position_BT, lambda: compute_angles(position_BT, rates, dtype, magnitude))
    # one call for q and k: for one token, launching an operator costs more than its arithmetic
    if q.shape[2] == 1 and q.dtype == k.dtype:
        both = rotate(torch.cat((q, k), dim=1), cos, sin)
        return both[:, : q.shape[1]], both[:, q.shape[1] :]
    return rotate(q, cos, sin), rotate(k, cos, sin)
