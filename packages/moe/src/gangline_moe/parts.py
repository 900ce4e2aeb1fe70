"""What the package offers beside the edit: a health check and a tracker. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from gangline import Part
from gangline.config import HealthConfig, MoreThan, OrInfinite, PositiveInt, TrackConfig


@dataclass
class ExpertsHealth(HealthConfig):
    """Warns of an expert without tokens, and of one with far more than its share."""

    patience: PositiveInt = 20  # steps in a row before it is said
    hot: Annotated[float, MoreThan(1), OrInfinite()] = 4.0  # times the mean load of its layer


@dataclass
class Heatmap(TrackConfig):
    """Pictures for TensorBoard: the load of every expert (across) of every layer (down), now and then."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    every: PositiveInt = 50  # steps from one picture to the next; each is of all steps since the last
    path: str | None = None  # null: tensorboard/experts in the run directory


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
