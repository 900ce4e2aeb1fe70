"""float16 with a dynamic loss scale (Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2)."""

from __future__ import annotations

from typing import Any

import torch

from gangline.config.schema import Run
from gangline_basics.precision.config import Fp16
from gangline_basics.precision.plain import CastPrecision


class ScaledFp16(CastPrecision):
    """float16 with a loss scale that doubles after enough finite steps in a row, and halves after a non-finite step."""

    def __init__(self, config: Fp16) -> None:
        super().__init__(torch.float16, torch.float32)
        self._config, self._scale, self._good = config, config.initial_scale, 0

    @property
    def scale(self) -> float:
        return self._scale

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self._scale, self._good = max(self._scale / 2, self._config.min_scale), 0
            return
        self._good += 1
        if self._good == self._config.growth_interval:
            self._scale, self._good = self._scale * 2, 0

    def state(self) -> dict[str, Any]:
        return {"scale": self._scale, "good_steps": self._good}

    def load_state(self, state: dict[str, Any]) -> None:
        if state:  # empty if the run that saved the state used another precision
            self._scale, self._good = float(state["scale"]), int(state["good_steps"])


def build(config: Fp16, run: Run) -> ScaledFp16:
    """Return the precision `fp16`."""
    return ScaledFp16(config)
