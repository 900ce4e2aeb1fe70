"""Merging of adapters into the weights that they wrap."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def merge_adapter(name: str, weight: Tensor, stored: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return the parameter `name` merged with its adapter, if it has one."""
    path = name.removesuffix(".weight")
    if f"{path}.lora_a.weight" not in stored:
        return weight
    v = weight + scale * stored[f"{path}.lora_b.weight"] @ stored[f"{path}.lora_a.weight"]
    if f"{path}.lora_lengths.weight" not in stored:
        return v
    lengths = weight.norm(dim=1) + stored[f"{path}.lora_lengths.weight"]
    return (lengths / v.norm(dim=1).clamp_min(torch.finfo(v.dtype).tiny))[:, None] * v
