"""How the elastic agent is asked to stop, and how it stops ranks that have no step boundary to wait for."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from gangline.launch import guard
from gangline.launch.signals import STOP, HandedOn, Requests, asked_by, hand_on

UNUSED = "SIGQUIT"  # the agent insists on handlers of its own for some signal
_LEFT_SECONDS = 1.0  # ranks that are left when one has failed have them, for what their threads are writing


class Request:
    """What this process was asked by a signal. The first one ends the agent's watch and is handed on to the ranks."""

    def __init__(self) -> None:
        self.signum = 0
        self.heard = False
        self._requests = Requests()

    def __call__(self, signum: int, frame: object) -> None:
        if self.heard or not self._requests.take(signum):
            return
        asked = asked_by(signum)
        self.signum = self.signum or asked
        raise SignalException(asked.name, hand_on(asked))  # type: ignore[arg-type]


@contextmanager
def requests() -> Iterator[Request]:
    """Take what asks this process to stop, until the end of the block."""
    request = Request()
    before = {signum: signal.signal(signum, request) for signum in (*STOP, *HandedOn)}
    quit_before = signal.getsignal(getattr(signal, UNUSED))
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.signal(getattr(signal, UNUSED), quit_before)


def kill_those_left(context: Any) -> None:
    """Where torch closes the context by itself, since a rank has ended, it would ask the others to stop (SIGTERM).

    That is a request of the user's, and these have no step boundary to wait for: their collectives never end.
    """
    close = context.close

    def closed(death_sig: Any = None, timeout: int = 30) -> None:
        if death_sig is None:
            end = time.monotonic() + _LEFT_SECONDS
            for pid in context.pids().values():
                guard.wait_for_end(pid, max(0.0, end - time.monotonic()))
        close(death_sig or signal.SIGKILL, timeout)

    context.close = closed
