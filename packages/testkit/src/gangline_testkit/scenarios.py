"""What the suite of strategies runs: layouts of the ranks, models with their batches, and how near two runs must be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gangline.mesh import AXES

FLOAT64, FLOAT32 = 1e-12, 1e-5  # bounds of layout invariance, relative to the largest magnitude of an array


@dataclass(frozen=True)
class RunLayout:
    """A world and the settings that lay the run over it."""

    world: int
    settings: tuple[str, ...] = ()

    @classmethod
    def from_words(cls, words: str) -> RunLayout:
        """Axes and options of a strategy that has every axis, "pp=2 tp=2 zero=3"; an axis left out has one rank."""
        options = {**dict.fromkeys(AXES, "1"), **dict(word.split("=") for word in words.split())}
        world = math.prod(int(options[axis]) for axis in AXES)
        return cls(world, tuple(f"parallel.{name}={value}" for name, value in options.items()))

    def __str__(self) -> str:
        return "-".join([str(self.world), *(setting.split(".")[-1] for setting in self.settings)])


@dataclass(frozen=True)
class Scenario:
    """A model and its batches."""

    settings: tuple[str, ...] = ()
    batches: str = "ragged"
    dtype: torch.dtype = torch.float64
    lanes: int = 0  # the size of the fold that the toy edit's module lies on; 0: no edit
    recompute: bool = False
    steps: int = 3


PLAIN = Scenario()  # three steps; elsewhere a step and one that stands on it
TIED = Scenario(("model.tied=true",), steps=2)
DOCUMENTS = Scenario(batches="documents", steps=1)
ACCUMULATED = Scenario(("batch.global_size=16", "batch.micro_size=2"), steps=2)
LANES = Scenario(lanes=2, steps=2)
RECOMPUTED = Scenario(lanes=2, recompute=True, steps=1)
SINGLE = Scenario(dtype=torch.float32, steps=1)
EXACT = Scenario(("run.deterministic=true",), dtype=torch.float32, steps=2)
EXACT_EVALUATION = Scenario(  # in float64, and many losses: their sum has other bits in another grouping
    ("run.deterministic=true", "batch.global_size=24"), batches="documents", steps=0
)
EXACT_TIED = Scenario(("run.deterministic=true", "model.tied=true"), dtype=torch.float32, steps=2)
