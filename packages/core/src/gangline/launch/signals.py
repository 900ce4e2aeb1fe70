"""Signals in a rank: the first signal requests a stop at the step boundary, the second ends the process. Torch-free.

A thread reads the signals, so that they also take effect while the main thread waits in a collective.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum

SAME_REQUEST_SECONDS = 1.0  # repeats within this time are copies: a scheduler may signal a process and its group
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES)
_ENDS = (signal.SIGTERM, signal.SIGHUP)

# All real-time signals of this program are listed here; each has one meaning in a rank.
_REAL_TIME = getattr(signal, "SIGRTMIN", None)
STACKS = None if _REAL_TIME is None else _REAL_TIME + 5  # a rank writes the stacks of its threads into its log
ANSWER = None if _REAL_TIME is None else _REAL_TIME + 11  # a rank calls the function that `answer_signal` set

# A launcher forwards a stop request as SIGRTMIN+6 to +10, so that a rank can tell it from a Ctrl-C or SIGTERM that
# reached the rank directly.
HandedOn = IntEnum(  # type: ignore[misc]
    "HandedOn", {asked.name: asked if _REAL_TIME is None else _REAL_TIME + 6 + i for i, asked in enumerate(STOP)}
)

_answers: dict[int, Callable[[], None]] = {}
_requested: str | None = None
_watched = False


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals of STOP that this process handles: all except signals ignored at its start, as under nohup.

    A shell also starts the background jobs of a script with SIGINT ignored. Call this before a handler is set.
    """
    ignored = [one for one in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) == signal.SIG_IGN]
    return tuple(one for one in STOP if one not in ignored)


def ignore_notices() -> None:
    """Ignore SIGUSR1 and SIGUSR2 of a scheduler from now on: until a launcher handles them there is nothing to save."""
    for signum in NOTICES:
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_IGN)


@contextmanager
def ignore_early_requests() -> Iterator[None]:
    """Ignore SIGUSR1 and SIGUSR2; until a launcher handles SIGTERM and SIGHUP, they end this process with a message."""
    ignore_notices()
    early = [one for one in _ENDS if signal.getsignal(one) == signal.SIG_DFL]
    for signum in early:
        signal.signal(signum, _end)
    try:
        yield
    finally:
        restore_handlers()


def restore_handlers() -> None:
    """Restore the default action of SIGTERM and SIGHUP: Python runs no handler while a rank waits in a collective."""
    for signum in _ENDS:
        if signal.getsignal(signum) is _end:
            signal.signal(signum, signal.SIG_DFL)


def _end(signum: int, frame: object) -> None:
    restore_handlers()  # a second request ends the process at once
    with suppress(OSError):
        text = f"train: {name_of(signum)} ended the command while no rank was running; there was no state to save\n"
        os.write(2, text.encode())
    raise SystemExit(128 + signum)


def stop_requested() -> str | None:
    """Return the name of the signal that asked this rank to stop, or None. Ranks must agree on it before they act."""
    return _requested


def is_watched() -> bool:
    """Return whether the local launcher watches this rank: it kills a rank that does not stop in time."""
    return _watched


def answer_signal(signum: int, call: Callable[[], None]) -> None:
    """Set the handler of a signal: each arrival runs `call` in a new thread, even if the main thread is busy.

    Must be called in the main thread. Raises ValueError for a signal that requests a stop or stack traces of a rank.
    """
    if signum in (*STOP, *HandedOn):
        raise ValueError(f"{name_of(signum)} is reserved: it requests a stop of the rank")
    if signum == STACKS:
        raise ValueError(f"{name_of(signum)} is reserved: it requests stack traces of the rank's threads")
    _answers[signum] = call
    signal.signal(signum, _ignore)
    signal.siginterrupt(signum, False)  # interrupted transfers continue


def hand_on(signum: int) -> HandedOn:
    """Return the real-time signal that forwards the request of `signum`, which may itself be a forwarded signal."""
    return HandedOn[find_asker(signum).name]


def find_asker(signum: int) -> signal.Signals:
    """Return the original signal of the request of `signum`, which may be a forwarded signal."""
    return signal.Signals(signum) if signum in STOP else signal.Signals[HandedOn(signum).name]


def name_of(signum: int) -> str:
    """Return the name of a signal, such as "SIGKILL"; "signal 41" for a real-time signal, which has no name."""
    return signal.Signals(signum).name if signum in list(signal.Signals) else f"signal {signum}"


def exit_code(ended: int) -> int:
    """Return a command's exit code from the return code `ended` of its process: 128 + n for -n (killed by signal n)."""
    if ended >= 0:
        return ended
    return 128 + (find_asker(-ended) if -ended in list(HandedOn) else -ended)


class Requests:
    """Distinguishes a request that arrives twice, directly and forwarded, from a request that is repeated."""

    def __init__(self) -> None:
        self._first: dict[bool, float] = {}  # whether forwarded -> time of the first such request

    def take(self, signum: int) -> int:
        """Return 1 for the first request, 2 for a repeated request, 0 for a copy of a known request."""
        handed_on, now = signum not in STOP, time.monotonic()
        new, before = not self._first, self._first.setdefault(handed_on, now)
        if new:
            return 1
        return 2 if now - before > SAME_REQUEST_SECONDS else 0


def install(by_agent: bool) -> None:
    """Install the signal handlers and the thread that reads signals; call this function in the main thread.

    by_agent: whether the local launcher watches this rank and kills it if it does not stop in time.
    """
    global _requested, _watched
    _requested, _watched = None, by_agent
    arrived, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for signum in (*stop_signals(), *HandedOn):
        signal.signal(signum, _ignore)
    threading.Thread(target=_watch, args=(arrived,), daemon=True, name="signals").start()


def _ignore(signum: int, frame: object) -> None:
    """Ignore the signal, because the thread reads it from the wake-up pipe."""


def _watch(arrived: int) -> None:
    global _requested
    requests = Requests()
    while True:
        signum = os.read(arrived, 1)[0]
        if signum in _answers:
            threading.Thread(target=_answers[signum], daemon=True, name="answer").start()
        if signum not in (*STOP, *HandedOn):
            continue
        asker = find_asker(signum)
        match requests.take(signum):
            case 1:
                _requested = signal.SIGTERM.name if asker == signal.SIGHUP else asker.name
            case 2:
                os._exit(128 + asker)
