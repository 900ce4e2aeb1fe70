"""Row lengths of DoRA: absolute in peft's files, here as differences from the base."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

LENGTHS = ".lora_lengths.weight"


def compute_lengths(name: str, tensor: Tensor, stored: Mapping[str, Tensor]) -> Tensor:
    """Return adapter parameter `name` as peft stores it. stored: all parameters of the checkpoint."""
    if not name.endswith(LENGTHS):
        return tensor
    return stored[f"{name.removesuffix(LENGTHS)}.weight"].norm(dim=1) + tensor
