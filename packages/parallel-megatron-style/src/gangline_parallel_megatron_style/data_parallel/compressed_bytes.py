"""What a compressed gradient comes to between ranks. Torch-free."""

from __future__ import annotations

CHUNK = 256  # gradients that share a scale under compress=onebit
WIRE = {"bf16": 2.0, "onebit": (1 + 32 / CHUNK) / 8}  # bytes of a compressed gradient
