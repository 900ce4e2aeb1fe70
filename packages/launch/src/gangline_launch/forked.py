"""An agent that is forked from the server that its ranks will come from: torch is loaded once a node. Torch-free.

A scheduler signals the whole process group of what it started. So the agent leads a group of its own, and it alone is
told.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from gangline.launch import guard
from gangline.launch.signals import NOTICES, exit_code, hand_on, stop_signals
from gangline.plugin.registry import load
from gangline.run.ending import EXIT_FAILURE
from gangline_basics.launch import failures, forkserver

if TYPE_CHECKING:
    from gangline.config.schema import Run

_UNSEEN = 255  # multiprocessing's exit code of a process whose end nobody saw
OF_AN_AGENT = ("gangline_basics.launch.elastic", "gangline_basics.launch.meeting")


def fork_agent(target: str, args: tuple[Any, ...], run: Run) -> int:
    """Run `target(*args)`, "package.module:name", in a process of its own that has loaded what the run's ranks need.

    Its exit code, 128 + n where signal n ended it. Signals are handed on. Call it in the main thread.
    """
    forwarder = _Told()
    before = {
        signum: signal.signal(signum, signal.SIG_IGN if signum in NOTICES else forwarder) for signum in stop_signals()
    }
    agent = None
    try:
        forkserver.warm(OF_AN_AGENT, run)
        context = multiprocessing.get_context("forkserver")
        ready, tell = context.Pipe(duplex=False)
        agent = context.Process(target=_enter, args=(target, args, os.getpid(), forkserver.find_loaded(), tell))
        agent.start()  # returns once the server has loaded everything
        forwarder.holds = True
        tell.close()
        _wait(ready)
        forwarder.start_forwarding(agent.pid or 0)
        for signum in NOTICES:
            signal.signal(signum, forwarder)
        agent.join()
        code = agent.exitcode or 0
        if code == _UNSEEN:  # the server is gone, which the agent has noticed and says
            guard.wait_for_end(agent.pid or 0)
            return EXIT_FAILURE
        return exit_code(code)
    except SystemExit:  # asked to end as the agent had just begun: it would be waited for, and has not heard of it
        if agent is not None and agent.pid is not None:
            agent.kill()
        raise
    except (EOFError, OSError):
        if not (server_exit := forkserver.read_exit()):
            raise
        print(f"train: {failures.explain_lost_server(server_exit)}", file=sys.stderr, flush=True)
        return EXIT_FAILURE
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _Told:
    """Hands signals on. Before the agent is there, one that asks for the end ends this process, and the server."""

    def __init__(self) -> None:
        self.holds = False  # the agent has been started, and is told once it can be
        self._pid = 0
        self._held: list[int] = []

    def start_forwarding(self, pid: int) -> None:
        """The agent takes signals; it gets those that came before."""
        self._pid = pid
        while self._held:
            guard.send(pid, hand_on(self._held.pop(0)))

    def __call__(self, signum: int, frame: object) -> None:
        if self._pid:
            guard.send(self._pid, hand_on(signum))
        elif self.holds:
            self._held.append(signum)
        else:
            raise SystemExit(128 + signum)


def _wait(ready: Connection) -> None:
    """Until the agent can be signalled, or has ended."""
    with contextlib.suppress(EOFError):
        ready.recv_bytes()


def _enter(target: str, args: tuple[Any, ...], owner: int, loaded: set[str], tell: Connection) -> None:
    """In the agent's own process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in NOTICES:
        signal.signal(signum, signal.SIG_IGN)
        signal.signal(hand_on(signum), signal.SIG_IGN)
    guard.die_with(owner)
    forkserver.adopt(loaded)
    try:
        tell.send_bytes(b"ready")
    except BrokenPipeError:  # who started this agent ends, or has ended
        sys.exit(128 + signal.SIGTERM)
    tell.close()
    sys.exit(load(target)(*args))
