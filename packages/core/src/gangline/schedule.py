"""Contract of learning-rate schedules. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol


class LearningRateSchedule(Protocol):
    """A pure, torch-free function of the step; core multiplies `optimizer.learning_rate` by its result."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the factor of the learning rate in `step`, in [0, 1]. step: counted from 0."""
