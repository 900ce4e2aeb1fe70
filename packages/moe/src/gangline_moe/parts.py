"""The health check `experts` and the tracker `experts`. Torch-free."""

from __future__ import annotations

from gangline import Part
from gangline_moe.config import ExpertsHealth, Heatmap

HEALTH = (
    Part(
        name="experts",
        config=ExpertsHealth,
        build="gangline_moe.health:ExpertsCheck",
        summary="warning of experts without tokens, or with far more tokens than the mean",
    ),
)
TRACK = (
    Part(
        name="experts",
        config=Heatmap,
        build="gangline_moe.heatmap:build",
        summary="heatmaps of the experts' load for TensorBoard",
    ),
)
