"""Health for gangline: hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Part, hookimpl
from gangline_health import config


@hookimpl
def gangline_health_checks() -> Iterable[Part]:
    return config.PARTS
