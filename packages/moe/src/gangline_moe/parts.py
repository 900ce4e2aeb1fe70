"""What the package offers beside the edit: a health check and a tracker. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline.errors import Problem
from gangline.parts import HealthConfig, Part, TrackConfig

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class ExpertsHealth(HealthConfig):
    """Warns of an expert without tokens, and of one with far more than its share."""

    patience: int = 20  # steps in a row before it is said
    hot: float = 4.0  # times the mean load of its layer

    def check(self, run: Run) -> list[Problem]:
        found = []
        if self.patience < 1:
            found.append(Problem(f"health.experts.patience={self.patience} must be at least 1."))
        if not self.hot > 1:
            found.append(Problem(f"health.experts.hot={self.hot} must be more than 1, the mean load."))
        return found


@dataclass
class Heatmap(TrackConfig):
    """Pictures for TensorBoard: the load of every expert (across) of every layer (down), now and then."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    every: int = 50  # steps from one picture to the next; each is of all steps since the last
    path: str | None = None  # null: tensorboard/experts in the run directory

    def check(self, run: Run) -> list[Problem]:
        if self.every > 0:
            return []
        return [Problem(f"track.experts.every={self.every} is not a number of steps.", "", "track.experts.every=50")]


HEALTH = (
    Part(
        name="experts",
        config=ExpertsHealth,
        build="gangline_moe.health:ExpertsCheck",
        summary="experts without tokens, or with far more than their share",
    ),
)
TRACK = (
    Part(
        name="experts",
        group="track",
        config=Heatmap,
        build="gangline_moe.heatmap:build",
        summary="pictures of the experts' load for TensorBoard",
    ),
)
