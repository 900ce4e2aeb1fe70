"""What an adapter's own file holds: names, and further files. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Adapter:
    """What stands apart from a model's weights.

    names    our name of each parameter -> its name in the file
    files    further files: name -> what they hold as JSON
    weights  the name of the safetensors file
    """

    names: Mapping[str, str]
    files: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "adapter_model.safetensors"
