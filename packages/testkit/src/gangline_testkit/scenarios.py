"""Scenarios of `StrategySuite`: layouts, models with batches, and tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gangline.mesh import AXES

FLOAT64, FLOAT32 = 1e-12, 1e-5  # bounds of layout invariance, relative to the largest magnitude of an array


@dataclass(frozen=True)
class RunLayout:
    """Number of ranks, and the settings of their layout."""

    world: int
    settings: tuple[str, ...] = ()

    @classmethod
    def from_words(cls, words: str) -> RunLayout:
        """Parse axes and options of a strategy with all axes, such as "pp=2 tp=2 zero=3"; other axes have one rank."""
        options = {**dict.fromkeys(AXES, "1"), **dict(word.split("=") for word in words.split())}
        world = math.prod(int(options[axis]) for axis in AXES)
        return cls(world, tuple(f"parallel.{name}={value}" for name, value in options.items()))

    def __str__(self) -> str:
        return "-".join([str(self.world), *(setting.split(".")[-1] for setting in self.settings)])


@dataclass(frozen=True)
class Scenario:
    """Model settings, kind of batches, and number of steps."""

    settings: tuple[str, ...] = ()
    batches: str = "ragged"
    dtype: torch.dtype = torch.float64
    lanes: int = 0  # size of the fold of the toy edit `lanes`; 0: no edit
    recompute: bool = False
    steps: int = 3


PLAIN = Scenario()  # other scenarios need fewer steps, because the second step already depends on an update
TIED = Scenario(("model.tied=true",), steps=2)
DOCUMENTS = Scenario(batches="documents", steps=1)
ACCUMULATED = Scenario(("batch.global_size=16", "batch.micro_size=2"), steps=2)
LANES = Scenario(lanes=2, steps=2)
RECOMPUTED = Scenario(lanes=2, recompute=True, steps=1)
SINGLE = Scenario(dtype=torch.float32, steps=1)
EXACT = Scenario(("run.deterministic=true",), dtype=torch.float32, steps=2)
EXACT_EVALUATION = Scenario(  # many losses, so that the bits of their sum depend on the grouping
    ("run.deterministic=true", "batch.global_size=24"), batches="documents", steps=0
)
EXACT_TIED = Scenario(("run.deterministic=true", "model.tied=true"), dtype=torch.float32, steps=2)
