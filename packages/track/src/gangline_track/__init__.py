"""Pluggy hooks of gangline-track: trackers for third-party tracking services. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Part, hookimpl
from gangline_track import config


@hookimpl
def gangline_trackers() -> Iterable[Part]:
    return config.PARTS
