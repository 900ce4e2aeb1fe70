"""What the fork server imports before all else: how it takes signals. Nobody else imports this module.

While it loads torch, a signal or the end of its parent ends it at once; later multiprocessing does that. A notice, such
as a scheduler's of the end of the time, does not: there is nothing to save yet.
Once it has forked a rank it stays until the last process that can ask it for more has ended. A signal to the whole
process group must not end it sooner: the agent hears of its ranks through it. Ranks end by themselves when their agent
is gone, but one that is stopped (SIGSTOP) does not: who has started this server being gone, it kills what is left.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from pathlib import Path

_PARENT = os.getppid()
_LOOK_SECONDS = 1.0  # between two looks at the parent, once ranks were forked
_LOOKS = 3  # that find it gone, before ranks that did not end by themselves are killed
# The command was started to ignore these, as by nohup; `gangline.launch.signals.stop_signals` finds the same in a rank.
_IGNORED = {signum for signum in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(signum) == signal.SIG_IGN}
_gone = 0  # looks that found it gone
_TOLD = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _leave(signum: int, frame: object) -> None:
    """Without a traceback."""
    os._exit(128 + signum)


def _look(signum: int, frame: object) -> None:
    if os.getppid() != _PARENT:
        os._exit(0)


def _look_after(signum: int, frame: object) -> None:
    global _gone
    _gone = _gone + 1 if os.getppid() != _PARENT else 0
    if _gone >= _LOOKS:
        for children in Path("/proc/self/task").glob("*/children"):
            for pid in children.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def _stay() -> None:
    signal.signal(signal.SIGALRM, _look_after)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
    for signum in _TOLD:
        signal.signal(signum, signal.SIG_IGN)


def _be_a_rank() -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):  # a notice means nothing until it takes them
        if signum not in _IGNORED:
            signal.signal(signum, signal.SIG_DFL)


for _signum in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} - _IGNORED:  # multiprocessing ignores SIGINT later
    signal.signal(_signum, _leave)
for _signum in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(_signum, signal.SIG_IGN)
signal.signal(signal.SIGALRM, _look)
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # the interpreter takes down its handlers first
os.register_at_fork(before=_stay, after_in_child=_be_a_rank)
