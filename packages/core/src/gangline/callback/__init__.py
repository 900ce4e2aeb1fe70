"""What acts while a run lives, on every rank: what a callback imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.callback.base import (
        Callback as Callback,
        Metrics as Metrics,
        like_parameters as like_parameters,
        start_from_weights as start_from_weights,
    )

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.callback.base": "Callback Metrics like_parameters start_from_weights",
    },
)
