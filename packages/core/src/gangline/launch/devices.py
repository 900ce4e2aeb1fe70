"""How many accelerators this machine has, without touching one. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def count_gpus(device: str | None = None, environ: Mapping[str, str] = os.environ, devices: str = "/dev") -> int:
    """Return how many GPUs the processes of a run may take; none for a run on the CPU.

    Counts device files instead of asking a driver: nothing here may touch a GPU.
    """
    if device is not None and device.split(":")[0] == "cpu":
        return 0
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path(devices).glob("nvidia*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
