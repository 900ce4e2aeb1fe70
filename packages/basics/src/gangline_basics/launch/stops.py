"""How the elastic agent is asked to stop, and how it stops ranks that have no step boundary to wait for."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess

from torch.distributed.elastic.multiprocessing import SignalException

from gangline.launch.signals import HandedOn, Requests, find_asker, hand_on, stop_signals

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
        asker = find_asker(signum)
        self.signum = self.signum or asker
        raise SignalException(asker.name, hand_on(asker))  # type: ignore[arg-type]


@contextmanager
def take_requests() -> Iterator[Request]:
    """Take what asks this process to stop, until the end of the block."""
    request = Request()
    before = {signum: signal.signal(signum, request) for signum in (*stop_signals(), *HandedOn)}
    quit_before = signal.getsignal(getattr(signal, UNUSED))
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.signal(getattr(signal, UNUSED), quit_before)


@contextmanager
def start_killed_ranks() -> Iterator[None]:
    """The processes that are started in this block: asked to end by torch, each is killed a second later.

    As soon as one rank has failed torch asks the others to stop, by SIGTERM. That is a request of the user's, after
    which a rank goes on to the next step boundary; and for these there is none: their collectives never end.
    """
    before = set(multiprocessing.active_children())
    yield
    for process in set(multiprocessing.active_children()) - before:
        process.terminate = partial(_kill_soon, process)  # type: ignore[method-assign]


def _kill_soon(process: BaseProcess) -> None:
    timer = threading.Timer(_LEFT_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
