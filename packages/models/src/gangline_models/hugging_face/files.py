"""What a directory of safetensors calls its tensors. Torch-free.

A safetensors file is 8 bytes (little-endian length of the header), the header (JSON: name -> ...) and the bytes.
"""

from __future__ import annotations

import json
from pathlib import Path


def tensor_names(directory: str | Path) -> set[str]:
    """The names of all tensors; none where there is no file to look into."""
    found: set[str] = set()
    for path in sorted(Path(directory).expanduser().glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            found |= set(json.loads(file.read(length)))
    return found - {"__metadata__"}


def passed_over(weights: str | None, beginning: str) -> list[str]:
    """The notice of tensors whose names begin so, which predict further tokens; none where there are none."""
    if weights is None or not any(name.startswith(beginning) for name in tensor_names(weights)):
        return []
    return [f"model.weights={weights}: its weights that predict further tokens ({beginning}*) are passed over."]
