"""Signal handling of the fork server, which imports this module first. No other process imports it.

While the server loads torch, a signal or the end of its parent ends the server at once; later multiprocessing ends it.
A notice signal, such as a scheduler's notice of the time limit, does not end the server, because there is nothing to
save yet.

After the server has forked a rank, it runs until the last process that can request a rank has ended. A signal to the
entire process group must not end the server earlier, because the server reports the exits of ranks to the agent. Ranks
end by themselves when their agent is gone, except a stopped rank (SIGSTOP). Therefore the server kills all remaining
ranks when its parent is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from pathlib import Path

_PARENT = os.getppid()
_LOOK_SECONDS = 1.0  # interval in seconds between checks of the parent, after a rank was forked
_LOOKS = 3  # number of consecutive checks that find the parent gone before the remaining ranks are killed
# Signals that the command ignores, as under nohup; ranks read them from `gangline.launch.signals.stop_signals`.
_IGNORED = {signum for signum in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(signum) == signal.SIG_IGN}
_gone = 0  # number of consecutive checks that found the parent gone
_TOLD = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _leave(signum: int, frame: object) -> None:
    """Exit without a traceback."""
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
    # notice signals are ignored until the rank installs its own handlers
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        if signum not in _IGNORED:
            signal.signal(signum, signal.SIG_DFL)


for _signum in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} - _IGNORED:  # multiprocessing ignores SIGINT later
    signal.signal(_signum, _leave)
for _signum in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(_signum, signal.SIG_IGN)
signal.signal(signal.SIGALRM, _look)
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
# otherwise SIGALRM could arrive after the interpreter has removed its handlers
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
os.register_at_fork(before=_stay, after_in_child=_be_a_rank)
