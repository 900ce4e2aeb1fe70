"""What agents do in the tests of `gangline_launch.forked`."""

from __future__ import annotations

import os
import signal
import sys
import time

from launched import join, write

from gangline.launch.local import start
from gangline.launch.signals import HandedOn


def say(run_dir: str, name: str) -> None:
    os.environ.setdefault("RANK", "0")
    write(run_dir, name, server=os.getppid(), group=os.getpgid(0))


def reduces(run_dir: str) -> int:
    say(run_dir, "agent")
    return start(run_dir, 2, target="forked_agent:rank")


def rank(run_dir: str) -> int:
    number, add = join()
    write(run_dir, "reduce", sum=add(number + 1), server=os.getppid())
    return 0


def seven(run_dir: str) -> int:
    return 7


def killed(run_dir: str) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def waits(run_dir: str) -> int:
    signal.signal(HandedOn.SIGTERM, lambda *_: sys.exit(15))
    say(run_dir, "wait")
    time.sleep(300)
    return 0


def starts_after_the_server(run_dir: str) -> int:
    server = os.getppid()
    say(run_dir, "agent")
    while os.getppid() == server:
        time.sleep(0.02)
    return start(run_dir, 1, target="forked_agent:rank")
