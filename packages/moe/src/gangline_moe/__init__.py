"""Mixture of experts for gangline: hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Part, hookimpl
from gangline_moe import shapes
from gangline_moe.routers import config as routers


@hookimpl
def gangline_parts() -> Iterable[Part]:
    return [*shapes.PARTS, *routers.PARTS]
