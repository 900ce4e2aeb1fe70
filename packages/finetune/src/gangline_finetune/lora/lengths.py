"""Lengths of rows as DoRA has them in peft's files, and as differences to those of the base."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

LENGTHS = ".lora_lengths.weight"


def compute_lengths(name: str, tensor: Tensor, stored: Mapping[str, Tensor]) -> Tensor:
    """Our part `name` of an adapter, as peft keeps it. stored: all parameters of the checkpoint."""
    if not name.endswith(LENGTHS):
        return tensor
    return stored[f"{name.removesuffix(LENGTHS)}.weight"].norm(dim=1) + tensor
