"""DoRA magnitudes (row norms): absolute in peft's files, here differences from the base weight's row norms."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

LENGTHS = ".lora_lengths.weight"


def compute_lengths(name: str, tensor: Tensor, stored: Mapping[str, Tensor]) -> Tensor:
    """Return the adapter parameter `name` as peft stores it: magnitudes become absolute.

    stored: all parameters of the checkpoint.
    """
    if not name.endswith(LENGTHS):
        return tensor
    return stored[f"{name.removesuffix(LENGTHS)}.weight"].norm(dim=1) + tensor
