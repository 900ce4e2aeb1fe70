"""Files of an adapter: names of its tensors, and additional JSON files. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Adapter:
    """Export format of an adapter: its own files, without the base model's weights.

    names    gangline's name of each parameter -> the tensor's name in the file
    files    additional files: name -> content as JSON
    weights  name of the safetensors file
    base     (file, key): entry of `files` for the path of the base model's weights, if any; None: not written
    change   (gangline's name, tensor, all parameters of the checkpoint) -> tensor for the file; None: unchanged tensors
    """

    names: Mapping[str, str]
    files: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "adapter_model.safetensors"
    base: tuple[str, str] | None = None
    change: Callable[[str, torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor] | None = None
