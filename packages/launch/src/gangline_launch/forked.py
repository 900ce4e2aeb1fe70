"""Start of the elastic agent as a fork of its ranks' forkserver, so that torch is loaded once per node. Torch-free.

A scheduler signals the complete process group of the process that it started. The agent therefore leads its own process
group, and gets signals only from this process.
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

_UNSEEN = 255  # multiprocessing's exit code of a process whose end was not observed
OF_AN_AGENT = ("gangline_basics.launch.elastic", "gangline_basics.launch.meeting")


def fork_agent(target: str, args: tuple[Any, ...], run: Run) -> int:
    """Run `target(*args)`, "package.module:name", in a process forked with the modules of the run's ranks loaded.

    Returns the agent's exit code, or 128 + n if signal n ended the agent. Signals of this process are forwarded to the
    agent. Call it in the main thread.
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
        agent.start()  # returns after the server has loaded everything
        forwarder.holds = True
        tell.close()
        _wait(ready)
        forwarder.start_forwarding(agent.pid or 0)
        for signum in NOTICES:
            signal.signal(signum, forwarder)
        agent.join()
        code = agent.exitcode or 0
        if code == _UNSEEN:  # the server is gone; the agent has noticed and reports it
            guard.wait_for_end(agent.pid or 0)
            return EXIT_FAILURE
        return exit_code(code)
    except SystemExit:  # a stop signal that the started agent has not received: exit would wait for the agent
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
    """Signal handler that forwards signals to the agent. Before the agent starts, a stop signal ends this process."""

    def __init__(self) -> None:
        self.holds = False  # true if the agent has started: signals are held until it can receive them
        self._pid = 0
        self._held: list[int] = []

    def start_forwarding(self, pid: int) -> None:
        """Forward the held signals to the agent, and from now on every signal."""
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
    """Wait until the agent is ready to receive signals, or has ended."""
    with contextlib.suppress(EOFError):
        ready.recv_bytes()


def _enter(target: str, args: tuple[Any, ...], owner: int, loaded: set[str], tell: Connection) -> None:
    """Run the target in the forked agent, in its own process group. Exit with its code, or when `owner` ends."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in NOTICES:
        signal.signal(signum, signal.SIG_IGN)
        signal.signal(hand_on(signum), signal.SIG_IGN)
    guard.die_with(owner)
    forkserver.adopt(loaded)
    try:
        tell.send_bytes(b"ready")
    except BrokenPipeError:  # the process that started this agent is ending, or has ended
        sys.exit(128 + signal.SIGTERM)
    tell.close()
    sys.exit(load(target)(*args))
