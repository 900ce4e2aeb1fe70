"""Ports for tests that start whole jobs."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands out to whoever asks for any."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
