"""Files of an adapter: names of its tensors, and further files. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Adapter:
    """An adapter as files of its own, apart from the model's weights.

    names    gangline's name of each parameter -> its name in the file
    files    further files: name -> content as JSON
    weights  the name of the safetensors file
    base     (file, key) in `files` where the export writes the directory of the base's weights, if the run has one
    change   (gangline's name, its tensor, all parameters of the checkpoint) -> the tensor for the file; None: unchanged
    """

    names: Mapping[str, str]
    files: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "adapter_model.safetensors"
    base: tuple[str, str] | None = None
    change: Callable[[str, torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor] | None = None
