"""The copies of a rank's files that other nodes keep, and how little a node that is lost may hold up. Torch-free."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.tiers.peers import PATIENCE_SECONDS, SILENT_SECONDS, Peer

_AGAIN = 1.0  # seconds that a keeper is waited for that has answered before
_DROP = 5.0  # seconds in which one has to forget a copy
_REST = 20.0  # a node that failed is left alone so many times as long as that took: it costs a twentieth of the time


@final
class Copies:
    """Kept by `peers`, for one rank."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers
        self._answered: set[Peer] = set()
        self._resting: dict[Peer, tuple[float, str]] = {}  # until when, and why

    def put(self, path: str, file: Path, seconds: float, waiting: Callable[[], None]) -> str:
        """Why not all of them keep a copy, "" where they do.

        `seconds`: how long one may be silent. `waiting` is called while the bytes are on their way.
        """
        whys = [self._put(peer, path, file, seconds, waiting) for peer in self._peers]
        return next(filter(None, whys), "")

    def _put(self, peer: Peer, path: str, file: Path, seconds: float, waiting: Callable[[], None]) -> str:
        waiting()
        began = time.monotonic()
        until, why = self._resting.get(peer, (0.0, ""))
        if began < until:
            return why
        patience = _AGAIN if peer in self._answered else PATIENCE_SECONDS
        try:
            peer.put(path, file, min(patience, seconds), min(SILENT_SECONDS, seconds), waiting)
        except OSError as error:
            why, now = describe_error(error), time.monotonic()
            self._resting[peer] = now + _REST * (now - began), why
            return why
        self._answered.add(peer)
        return ""

    def drop(self, path: str) -> None:
        """Forget the copies of a file, as far as those who have them answer."""
        for peer in self._peers:
            if time.monotonic() >= self._resting.get(peer, (0.0, ""))[0]:
                with contextlib.suppress(OSError):
                    peer.drop(path, _DROP)
