"""Callback `paced`: slows down the steps, so that the tracking services keep up as in a real run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gangline import Part, hookimpl
from gangline.callback import Callback
from gangline.config import CallbackConfig


@dataclass
class Paced(CallbackConfig):
    """Configuration of `paced`, without options."""


class PacedCallback(Callback):
    """Callback that waits 0.05 s before each step."""

    def __init__(self, config: Paced, run: Any) -> None:
        pass

    def before_step(self, step: int) -> None:
        time.sleep(0.05)


@hookimpl
def gangline_callbacks() -> Iterator[Part]:
    yield Part(name="paced", config=Paced, build="paced:PacedCallback", summary="Does not hurry")
