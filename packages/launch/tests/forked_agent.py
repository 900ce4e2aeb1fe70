"""Agent functions for the tests of `gangline_launch.forked`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from gangline.launch.signals import HandedOn
from gangline_basics.launch.local import start


def write(run_dir: str, name: str, **content: object) -> None:
    """Write a JSON file of this rank under a temporary name, and rename it when it is complete."""
    final = Path(run_dir, f"{name}-{os.environ['RANK']}.json")
    final.with_suffix(".part").write_text(json.dumps({"pid": os.getpid(), **content}))
    final.with_suffix(".part").rename(final)


def say(run_dir: str, name: str) -> None:
    os.environ.setdefault("RANK", "0")
    write(run_dir, name, server=os.getppid(), group=os.getpgid(0))


def reduces(run_dir: str) -> int:
    say(run_dir, "agent")
    return start(run_dir, 2, target="forked_agent:rank")


def rank(run_dir: str) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    write(run_dir, "reduce", sum=total.item(), server=os.getppid())
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
