"""What an adapter's own file holds: names, and further files. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Adapter:
    """What stands apart from a model's weights.

    names    our name of each parameter -> its name in the file
    files    further files: name -> what they hold as JSON
    weights  the name of the safetensors file
    base     (file, key) of `files` that is to name the directory of the base's weights, where the run began with one
    change   (our name, its tensor, all parameters of the checkpoint) -> the tensor as the file has it; None: the same
    """

    names: Mapping[str, str]
    files: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "adapter_model.safetensors"
    base: tuple[str, str] | None = None
    change: Callable[[str, torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor] | None = None
