"""Signals in a rank: the first asks the loop to stop at the step boundary, a second one ends the process. Torch-free.

A thread reads what arrived, so that this works also while the main thread sits in a collective.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum

SAME_REQUEST_SECONDS = 1.0  # a scheduler may say it twice at once: to a process, and to its whole group
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES)
_ENDS = (signal.SIGTERM, signal.SIGHUP)

# The table of every real-time signal of this program, which a rank takes for one thing alone.
_REAL_TIME = getattr(signal, "SIGRTMIN", None)
STACKS = None if _REAL_TIME is None else _REAL_TIME + 5  # a rank writes the stacks of its threads into its log
ANSWER = None if _REAL_TIME is None else _REAL_TIME + 11  # a rank answers what `answer_signal` registered for it

# How a launcher hands a request on: SIGRTMIN + 6 to SIGRTMIN + 10. Ctrl-C, and a scheduler that signals whole groups,
# reach the ranks directly, too; a separate signal identifies the request that was handed on, however late it comes.
HandedOn = IntEnum(  # type: ignore[misc]
    "HandedOn", {asked.name: asked if _REAL_TIME is None else _REAL_TIME + 6 + i for i, asked in enumerate(STOP)}
)

_answers: dict[int, Callable[[], None]] = {}
_requested: str | None = None
_watched = False


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals of STOP that this process takes: not those that it was started to ignore, as by nohup.

    A shell has background jobs of a script ignore SIGINT, too. Call it before a handler is set.
    """
    ignored = [one for one in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) == signal.SIG_IGN]
    return tuple(one for one in STOP if one not in ignored)


def ignore_notices() -> None:
    """Ignore a scheduler's notices from here on: until a launcher takes them there is nothing to save."""
    for signum in NOTICES:
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_IGN)


@contextmanager
def ignore_early_requests() -> Iterator[None]:
    """Ignore a scheduler's notices; SIGTERM and SIGHUP end this process with a message until a launcher takes them."""
    ignore_notices()
    early = [one for one in _ENDS if signal.getsignal(one) == signal.SIG_DFL]
    for signum in early:
        signal.signal(signum, _end)
    try:
        yield
    finally:
        restore_handlers()


def restore_handlers() -> None:
    """Take back those handlers: Python runs none while a rank waits for others in torch."""
    for signum in _ENDS:
        if signal.getsignal(signum) is _end:
            signal.signal(signum, signal.SIG_DFL)


def _end(signum: int, frame: object) -> None:
    restore_handlers()  # a second request ends the process at once
    with suppress(OSError):
        text = f"train: {name_of(signum)} ended the command while no rank was running; nothing had to be saved\n"
        os.write(2, text.encode())
    raise SystemExit(128 + signum)


def stop_requested() -> str | None:
    """The name of the signal that asked this rank to stop, or None. The ranks have to agree on it before they act."""
    return _requested


def is_watched() -> bool:
    """Whether the local launcher watches over this rank: it kills a rank that has not stopped in time."""
    return _watched


def answer_signal(signum: int, call: Callable[[], None]) -> None:
    """Have a rank call that in a thread of its own whenever this signal comes, whatever its main thread is busy with.

    In the main thread. Raises ValueError for a signal that has another meaning in a rank.
    """
    if signum in (*STOP, *HandedOn):
        raise ValueError(f"{name_of(signum)} asks a rank to stop")
    if signum == STACKS:
        raise ValueError(f"{name_of(signum)} asks a rank for the stacks of its threads")
    _answers[signum] = call
    signal.signal(signum, _ignore)
    signal.siginterrupt(signum, False)  # transfers under way go on


def hand_on(signum: int) -> HandedOn:
    """The signal that hands on the request which came as this one."""
    return HandedOn[find_asker(signum).name]


def find_asker(signum: int) -> signal.Signals:
    """The signal that asked, where this one may have been handed on."""
    return signal.Signals(signum) if signum in STOP else signal.Signals[HandedOn(signum).name]


def name_of(signum: int) -> str:
    """SIGKILL; of a real-time signal, which has no name, "signal 41"."""
    return signal.Signals(signum).name if signum in list(signal.Signals) else f"signal {signum}"


def exit_code(ended: int) -> int:
    """The exit code of a command whose process ended so: 128 + n where signal n, -n here, ended it."""
    if ended >= 0:
        return ended
    return 128 + (find_asker(-ended) if -ended in list(HandedOn) else -ended)


class Requests:
    """Tells a request that reaches a process by two ways from one that is made twice."""

    def __init__(self) -> None:
        self._first: dict[bool, float] = {}  # by whether it was handed on

    def take(self, signum: int) -> int:
        """1 for the first request, 2 for one that is made again, 0 for one that is known already."""
        handed_on, now = signum not in STOP, time.monotonic()
        new, before = not self._first, self._first.setdefault(handed_on, now)
        if new:
            return 1
        return 2 if now - before > SAME_REQUEST_SECONDS else 0


def install(by_agent: bool) -> None:
    """Take signals from now on; call it in the main thread.

    `by_agent` says that the local launcher watches over this rank: it kills a rank that does not stop in time.
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
    """Nothing is left to do: the wake-up pipe has told the thread already."""


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
