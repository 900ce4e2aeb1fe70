"""Trackers of other people's services for gangline: hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Part, hookimpl
from gangline_track import config


@hookimpl
def gangline_trackers() -> Iterable[Part]:
    return config.PARTS
