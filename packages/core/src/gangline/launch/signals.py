"""Signals in a rank: the first asks the loop to stop at the step boundary, a second one ends the process. Torch-free.

A thread reads what arrived, so that this works also while the main thread sits in a collective.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

SAME_REQUEST_SECONDS = 1.0  # Ctrl-C reaches a rank twice: from the terminal, and handed on by the agent

# How the local agent hands a request on. It is not SIGTERM, for that is what torch's agent sends to the ranks that
# are left when one has failed, and these have no step boundary to wait for: their collectives never end.
HANDED_ON = {signal.SIGTERM: signal.SIGUSR2, signal.SIGHUP: signal.SIGUSR2}
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_answers: dict[int, Callable[[], None]] = {}
_requested: str | None = None
_watched = False


def stop_requested() -> str | None:
    """The name of the signal that asked this rank to stop, or None. The ranks have to agree on it before they act."""
    return _requested


def watched() -> bool:
    """Whether the local launcher watches over this rank: it kills a rank that has not stopped in time."""
    return _watched


def answer_signal(signum: int, call: Callable[[], None]) -> None:
    """Have a rank call that in a thread of its own whenever this signal comes, whatever its main thread is busy with.

    In the main thread. Raises ValueError for a signal that asks to stop.
    """
    if signum in STOP:
        raise ValueError(f"{signal.Signals(signum).name} asks a rank to stop")
    _answers[signum] = call
    signal.signal(signum, _noted)
    signal.siginterrupt(signum, False)  # transfers under way go on


def install(by_agent: bool) -> None:
    """Take signals from now on; call it in the main thread.

    `by_agent` says that the local launcher watches over this rank and hands requests on in its own way.
    """
    global _requested, _watched
    _requested, _watched = None, by_agent
    arrived, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for signum in STOP:
        signal.signal(signum, _noted)
    threading.Thread(target=_watch, args=(arrived, by_agent), daemon=True, name="signals").start()


def _noted(signum: int, frame: object) -> None:
    """Nothing is left to do: the wake-up pipe has told the thread already."""


def _watch(arrived: int, by_agent: bool) -> None:
    global _requested
    first = 0.0
    while True:
        signum = os.read(arrived, 1)[0]
        if signum in _answers:
            threading.Thread(target=_answers[signum], daemon=True, name="answer").start()
        if signum not in STOP:
            continue
        if _requested is not None:
            if time.monotonic() - first > SAME_REQUEST_SECONDS:
                os._exit(128 + signum)
            continue
        if by_agent and signum == signal.SIGTERM and not select.select([arrived], [], [], SAME_REQUEST_SECONDS)[0]:
            os._exit(128 + signum)  # the agent alone sent it: another rank has failed
        first = time.monotonic()
        _requested = _name(signum, by_agent)


def _name(signum: int, by_agent: bool) -> str:
    if (by_agent and signum in HANDED_ON.values()) or signum == signal.SIGHUP:
        return signal.SIGTERM.name
    return signal.Signals(signum).name
