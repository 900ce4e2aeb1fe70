"""The health check `experts` and the tracker `experts`. Torch-free."""

from __future__ import annotations

from gangline import Part
from gangline_moe.config import ExpertsHealth, Heatmap

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
        config=Heatmap,
        build="gangline_moe.heatmap:build",
        summary="pictures of the experts' load for TensorBoard",
    ),
)
