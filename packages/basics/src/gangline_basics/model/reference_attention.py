"""Reference attention with soft caps and sinks in plain operators, and the mask of visible keys.

No fused CPU kernel of torch supports soft caps or sinks (FlexAttention has no backward pass on the CPU), so this module
is the reference, in float64 or any other dtype. Autograd saves a few tensors of B·H·T² scores.

B batch, T tokens, H query heads, K key and value heads, C width of a head
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.model.calls import AttentionCall


def make_mask(call: AttentionCall, document_BT: Tensor | None, position_BT: Tensor) -> Tensor | None:
    """Return a mask (B, 1, T, T) or (1, 1, T, T), true where query i sees key j, or None if all keys are visible."""
    T = position_BT.shape[1]
    mask: Tensor | None = None
    if document_BT is not None:
        mask = document_BT[:, None, :, None] == document_BT[:, None, None, :]
    if call.window is not None:
        near = position_BT[:, None, :, None] - position_BT[:, None, None, :] < call.window
        mask = near if mask is None else mask & near
    if call.causal:
        mask = torch.ones(1, 1, T, T, dtype=torch.bool, device=position_BT.device) if mask is None else mask
        mask = mask.tril()
    return mask


def attend(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, mask: Tensor | None, call: AttentionCall, sinks_H: Tensor | None
) -> Tensor:
    """Return (B, H, T, C) as `AttentionCall` defines, softmax in float32 at least. Every query must see a key."""
    groups = q_BHTC.shape[1] // k_BKTC.shape[1]
    wide = torch.promote_types(q_BHTC.dtype, torch.float32)
    k_BHTC, v_BHTC = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k_BKTC, v_BKTC))
    scale = q_BHTC.shape[-1] ** -0.5 if call.scale is None else call.scale
    z_BHTT = (q_BHTC @ k_BHTC.mT).to(wide) * scale
    if call.soft_cap is not None:
        z_BHTT = call.soft_cap * (z_BHTT / call.soft_cap).tanh()
    if mask is not None:
        z_BHTT = z_BHTT.masked_fill(~mask, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(wide).view(1, -1, 1, 1).expand(*z_BHTT.shape[:3], 1)
        z_BHTT = torch.cat((z_BHTT, sinks), dim=-1)
    p_BHTT = z_BHTT.softmax(-1)[..., : k_BHTC.shape[2]]
    return p_BHTT.to(v_BHTC.dtype) @ v_BHTC
