"""torch.distributed's elastic agent on one machine: its rendezvous, its watch, its restarts.

Added to it: which rank failed first, a stop at the step boundary, and no files in the temp folder.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gangline.launch import failures, forkserver, worker
from gangline.launch.config import LocalLaunch
from gangline.launch.failures import EXIT_FAILURE, RankFailure
from gangline.launch.signals import HANDED_ON, SAME_REQUEST_SECONDS, STOP

_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
_UNUSED = "SIGQUIT"  # the agent insists on handlers of its own for some signal


def run_agent(run_dir: Path, world: int, config: LocalLaunch, target: str, args: tuple[Any, ...]) -> int:
    """See `gangline.launch.local.start`."""
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    failures.clear(logs)
    # With the agent's store shared, ranks that were started again meet the addresses of dead ones in it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_MP_PARALLEL_START", "1")
    files = RankFiles(logs, config.max_restarts)
    launch = elastic_launch(_agent_config(world, config, files), worker.enter)
    others = set(multiprocessing.active_children())
    with _agent_log(logs), _requests() as request:
        try:
            launch(str(run_dir), target, args, os.getpid())
        except SignalException as stop:
            return 128 + (request.signum or stop.sigval)
        except ChildFailedError as error:
            if request.signum:
                return 128 + request.signum
            return _explain(error, logs, files.restarts)
        except (EOFError, OSError):
            if not (code := forkserver.lost()):
                raise
            print(f"train: {_server_lost(code)}", file=sys.stderr, flush=True)
            return EXIT_FAILURE
        finally:
            request.heard = True
            _leave_nobody(others)
    return 0


def _agent_config(world: int, config: LocalLaunch, files: RankFiles) -> LaunchConfig:
    made = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        logs_specs=files,
        run_id=uuid.uuid4().hex,
        role="train",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",  # or the agent asks the name service for this machine's name
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        start_method="forkserver",
        signals_to_handle=_UNUSED,
    )
    if hasattr(made, "shutdown_timeout"):  # before that the agent waits for 30 seconds
        made.shutdown_timeout = round(config.grace_seconds)
    return made


class RankFiles(LogsSpecs):
    """Leaves the ranks' output to the ranks, and keeps the agent's own files out of the temp folder."""

    def __init__(self, logs: Path, max_restarts: int) -> None:
        super().__init__(str(logs))
        self.logs = logs
        self.max_restarts = max_restarts
        self.restarts = 0

    @property
    def root_log_dir(self) -> str:
        return str(self.logs)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called at each start of the ranks, with the environment that each of them is given."""
        self.restarts = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        if self.restarts:
            why = failures.first(self.logs, self.restarts - 1)
            who = f"rank {why.rank} failed first: {why.what}" if why is not None and why.what else "a rank was lost"
            if why is not None and why.kind == "restart":
                who = f"{why.what}; it asks for new workers"
            if why is None or why.mends_itself:  # of what no start mends the ranks say so at once, and it is told once
                print(f"train: {who}; restart {self.restarts} of {self.max_restarts}", file=sys.stderr, flush=True)
        if sys.platform == "linux":
            for env in envs.values():  # gloo would ask the name service for this machine, and use what network it names
                env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=dict(nowhere), error_files=dict.fromkeys(envs, os.devnull))


class _Request:
    """What this process was asked by a signal. The first one ends the agent's watch and is handed on to the ranks."""

    def __init__(self) -> None:
        self.signum = 0
        self.heard = False
        self._last = 0.0

    def __call__(self, signum: int, frame: object) -> None:
        now = time.monotonic()
        if self.heard or now - self._last < SAME_REQUEST_SECONDS:
            return
        self._last = now
        self.signum = self.signum or signum
        given = signal.Signals(signum)
        raise SignalException(f"{given.name}", HANDED_ON.get(given, given))


@contextmanager
def _requests() -> Iterator[_Request]:
    request = _Request()
    before = {signum: signal.signal(signum, request) for signum in STOP}
    quit_before = signal.getsignal(getattr(signal, _UNUSED))
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.signal(getattr(signal, _UNUSED), quit_before)


@contextmanager
def _agent_log(logs: Path) -> Iterator[None]:
    """The agent's own messages go to logs/agent.log: what they say of a failure is mostly about its followers."""
    handler = logging.FileHandler(logs / "agent.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
        handler.close()


def _explain(error: ChildFailedError, logs: Path, restarts: int) -> int:
    """Say what went wrong and give the exit code; raises the UserError where it was a user's mistake."""
    failure = failures.first(logs, restarts)
    if failure is None:  # it had no time to write, or only followers are known
        rank, seen = next(iter(error.failures.items()))
        code = forkserver.lost()
        failure = RankFailure(rank, "bug", EXIT_FAILURE, _server_lost(code) if code else _how_it_ended(seen.exitcode))
    if failure.kind == "user":
        raise failure.error()
    if failure.mends_itself:
        print(failures.report(failure, logs), file=sys.stderr, end="", flush=True)
    return failure.exit_code


def _server_lost(code: int) -> str:
    return f"the process that ranks are forked from is gone: {_how_it_ended(code)}"


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"it lost its connection to the other ranks, or ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
    return f"it was killed by {name}{hint}"


def _leave_nobody(others: set[BaseProcess]) -> None:
    """Whatever interrupted the agent: no rank is left behind. `others` were children of this process before."""
    for child in set(multiprocessing.active_children()) - others:
        child.kill()
        child.join()
