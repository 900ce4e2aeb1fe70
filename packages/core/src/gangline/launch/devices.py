"""Number of GPUs on this machine, counted without opening a device. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def count_gpus(device: str | None = None, environ: Mapping[str, str] = os.environ, devices: str = "/dev") -> int:
    """Return how many GPUs the processes of a run may use; 0 for a run on the CPU.

    The function counts device files instead of calling a driver, because this process must not open a GPU.
    """
    if device is not None and device.split(":")[0] == "cpu":
        return 0
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path(devices).glob("nvidia*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
