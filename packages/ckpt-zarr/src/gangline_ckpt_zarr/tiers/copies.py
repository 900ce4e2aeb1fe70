"""Copies of a rank's files on other nodes, with limits on the delay that a lost node causes. Torch-free."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.tiers.peers import PATIENCE_SECONDS, SILENT_SECONDS, Peer

_AGAIN = 1.0  # time-out, in seconds, for a keeper that has answered before
_DROP = 5.0  # time-out, in seconds, of a request to delete a copy
# Pause after a failed copy to a peer, as a multiple of the duration of this copy. So a failing peer costs at most 1/20
# of the time.
_REST = 20.0


@final
class Copies:
    """Copies of one rank's files that `peers` store."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers
        self._answered: set[Peer] = set()
        self._resting: dict[Peer, tuple[float, str]] = {}  # end of the peer's pause, and why its last copy failed

    def put(self, path: str, file: Path, seconds: float, waiting: Callable[[], None]) -> str:
        """Copy a file to all peers. Return why a peer has no copy, "" if all peers have a copy.

        `seconds`: time-out of a peer that does not answer. `waiting`: called repeatedly while bytes are sent.
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
        """Delete the copies of a file at all peers that answer."""
        for peer in self._peers:
            if time.monotonic() >= self._resting.get(peer, (0.0, ""))[0]:
                with contextlib.suppress(OSError):
                    peer.drop(path, _DROP)
