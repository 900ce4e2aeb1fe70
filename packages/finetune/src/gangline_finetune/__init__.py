"""From a model to one that does as it is told: hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Part, hookimpl
from gangline_finetune import parts


@hookimpl
def gangline_parts() -> Iterable[Part]:
    return parts.PARTS


@hookimpl
def gangline_data_sources() -> Iterable[Part]:
    return parts.SOURCES
