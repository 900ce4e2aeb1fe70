"""Learning-rate schedules: their contract. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol


class LearningRateSchedule(Protocol):
    """A pure, torch-free function of the step; a run multiplies `optimizer.learning_rate` by its result."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the factor of a step, in [0, 1]. The first step is 0."""
