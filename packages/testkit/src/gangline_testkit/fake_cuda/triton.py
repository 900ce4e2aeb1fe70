"""Run gangline's Triton kernels on the fake device, by Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gangline_testkit.fake_cuda.memory import to_host
from gangline_testkit.fake_cuda.watch import note_kernel


def install() -> None:
    """Make Triton interpret kernels, on the memory of their arguments, for the rest of the process."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    from gangline_basics.model import kernels

    vars(kernels)["_launches"] = lambda: True
    launch: Callable[..., Any] = interpreter.GridExecutor.__call__

    def launch_on_host(self: Any, *args: Any, **options: Any) -> None:
        note_kernel(f"triton::{self.fn.__name__}")
        with torch.utils._python_dispatch._disable_current_modes():
            launch(self, *map(_to_host, args), **{name: _to_host(value) for name, value in options.items()})

    interpreter.GridExecutor.__call__ = launch_on_host


def _to_host(value: Any) -> Any:
    return to_host(value) if isinstance(value, Tensor) else value
