"""Stop requests to the elastic agent, and the end of ranks that cannot reach a step boundary."""

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

UNUSED = "SIGQUIT"  # torch's agent must handle at least one signal
_LEFT_SECONDS = 1.0  # time in seconds for the other ranks to finish writing after a rank has failed


class Request:
    """Signal handler for stop requests. The first request ends the agent's monitoring and is passed on to the ranks."""

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
    """Handle the signals that ask this process to stop, until the end of the block."""
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
    """Make the processes started in the `with` block die a second after torch asks them to end.

    As soon as one rank has failed, torch sends SIGTERM to the other ranks. A rank treats SIGTERM as a user's request to
    stop at the next step boundary. After a failure no rank reaches that boundary, because collectives never finish.
    """
    before = set(multiprocessing.active_children())
    yield
    for process in set(multiprocessing.active_children()) - before:
        process.terminate = partial(_kill_soon, process)  # type: ignore[method-assign]


def _kill_soon(process: BaseProcess) -> None:
    timer = threading.Timer(_LEFT_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
