"""Free TCP ports for tests that start complete jobs."""

from __future__ import annotations

import contextlib
import random
import socket

_given: set[int] = set()


def free_port() -> int:
    """Return a free port in 20000 to 31999, below the ephemeral ports, and a different port on each call.

    Raises RuntimeError if all these ports are in use.
    """
    ports = [port for port in range(20000, 32000) if port not in _given]
    for port in random.sample(ports, len(ports)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise RuntimeError("all TCP ports from 20000 to 31999 are in use")
