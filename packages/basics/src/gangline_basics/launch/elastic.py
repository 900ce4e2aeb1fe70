"""Elastic agent based on torch.distributed's rendezvous and monitoring, with gangline's start and stop of workers.

Differences: a layout for each start (a generation), spare ranks that no layout can use, a report of the rank that
failed first, stops at a step boundary, and no files in the temp folder.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousTimeoutError,
)

from gangline.comm.job_store import ADDRESS
from gangline.errors import EXIT_USER_ERROR
from gangline.launch.network import LOOPBACK, NAME, find_listening_address
from gangline.launch.signals import hand_on
from gangline.run import generation
from gangline.run.ending import EXIT_FAILURE, EXIT_REQUEUE, decide_ending, read_ending
from gangline.run.events import read_events
from gangline.run.generation import VARIABLE
from gangline_basics.launch import failures, forkserver, worker
from gangline_basics.launch.agent_log import LOGGERS, divert_log
from gangline_basics.launch.config import LocalLaunch
from gangline_basics.launch.failures import RankFailure
from gangline_basics.launch.interface import find_interface
from gangline_basics.launch.nodes import get_machine
from gangline_basics.launch.starts import JobStart, Starts, end
from gangline_basics.launch.stops import UNUSED, start_killed_ranks, take_requests
from gangline_basics.launch.worker import SPARE

_UNANSWERED = "Timeout waiting for key"  # part of the RuntimeError that torch's FileStore raises after a timeout
_NO_LIMIT = 1 << 30  # torch's agent must not limit restarts, because `Starts` does
_LAST_SECONDS = 30.0  # timeout in seconds for which a finished node waits for the other nodes


class Stopped(Exception):
    """Error that ends the job without restarting the ranks."""

    def __init__(self, generation: int, failure: RankFailure) -> None:
        self.generation, self.failure = generation, failure
        super().__init__(failure.what)


class NoAgreement(Exception):
    """Error after a series of rendezvous that failed because a node was lost."""


@dataclass
class AgentNode:
    """This agent's node in the job, and the callbacks of its rendezvous."""

    name: str
    ranks: int  # number of ranks that this node starts
    handler: RendezvousHandler
    count: Callable[[], int]  # called on the leading node: counts a start of the job, returns the number of starts
    place: str = ""  # path from the top of the network to this node, if known
    address: str = ""  # address at which other nodes reach this node
    alone: bool = True  # True if the job has no other nodes
    log: str = "agent.log"
    met: Callable[[], None] = lambda: None  # called after each rendezvous
    over: Callable[[], None] = lambda: None  # called when this node ends the job for all nodes
    comes: Callable[[], None] = lambda: None  # blocks until this node may take part in the next start
    # records that a signal ended this node, returns the number of such nodes
    left: Callable[[int], int] = lambda generation: 1
    replaced: Callable[[], set[str]] = set  # returns nodes of the current start whose agent was lost and replaced
    meets_seconds: float = 0.0  # timeout in seconds for repeating the rendezvous after a node is lost


class Agent(LocalElasticAgent):
    """Elastic agent of one node."""

    def __init__(self, spec: WorkerSpec, files: RankFiles, node: AgentNode, starts: Starts, grace: float) -> None:
        super().__init__(spec, files, start_method="forkserver", exit_barrier_timeout=_LAST_SECONDS)
        self.files, self.node, self.starts, self.grace = files, node, starts, grace
        self.leads = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.node.met()
        start = self._agree(worker_group)
        if start.stop is not None:
            raise Stopped(start.generation, start.stop)
        self.files.start = start
        with start_killed_ranks():
            return super()._start_workers(worker_group)

    def _agree(self, group: WorkerGroup) -> JobStart:
        """Return the start that the leading node decides and sends to the others through the rendezvous store."""
        store: Any = group.store
        self.leads = group.group_rank == 0
        self.files.peers = []
        store.set(
            f"gangline/node/{group.group_rank}", json.dumps([self.node.name, self.node.place, str(self.node.address)])
        )
        if self.leads:
            nodes = [json.loads(store.get(f"gangline/node/{index}")) for index in range(group.group_world_size or 1)]
            first = self.node.count() == 1
            self.starts.places = [place or name for name, place, _ in nodes]
            self.files.peers = [address for _, _, address in nodes[1:]]
            start = self.starts.begin([name for name, *_ in nodes], self.node.ranks * len(nodes), first)
            one_machine = len({address for _, _, address in nodes}) == 1
            store.set("gangline/start", json.dumps([start.to_dict(), one_machine]))
        content, self.files.one_machine = json.loads(store.get("gangline/start"))
        return JobStart.of(content)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.starts.note_end()
            self._name(result)
        return result

    def _name(self, result: RunResult) -> None:
        """Record the failure of a rank that could not record it: a killed rank, or a user error on a full disk."""
        for rank, process in result.failures.items():
            if process.exitcode < 0 and self.files.start is not None:
                failure = RankFailure(rank, "bug", EXIT_FAILURE, failures.describe_end(process.exitcode))
                failures.claim(self.starts.logs, self.files.start.generation, failure)
            elif process.exitcode == EXIT_USER_ERROR and self.files.start is not None:
                failure = RankFailure(
                    rank, "ended", EXIT_USER_ERROR, "a user error, which is in the output of the rank"
                )
                failures.claim(self.starts.logs, self.files.start.generation, failure)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the ranks at a step boundary; kill them if a rank was lost, because they cannot reach a boundary."""
        failed = worker_group.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        if not failed:
            self.starts.note_end()
        if failed or self._has_lost_elsewhere() or self.node.replaced():
            self._shutdown(signal.SIGKILL)
            self._refuse_hopeless()
        else:
            self._shutdown(hand_on(signal.SIGTERM))

    def _has_lost_elsewhere(self) -> bool:
        """Return whether a rank of any node has recorded a failure, even if this agent has not yet detected it."""
        failure = failures.find_first(self.starts.logs, self.files.generation)
        return failure is not None and failure.kind in ("bug", "lost")

    def _refuse_hopeless(self) -> None:
        """Raise Stopped before the next rendezvous if the ranks must not be restarted."""
        assert self.files.start is not None
        number = self.files.start.generation
        failure = failures.find_first(self.starts.logs, number)
        settled = failure is not None and not failure.is_transient
        now = self.starts.predict(failure)
        if (self.node.alone or settled) and (stop := self.starts.stop(now, failure, stays=self.node.alone)):
            raise Stopped(number, stop)

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Start the workers after a rendezvous. If a node is lost during the rendezvous, repeat it without that node.

        Raises NoAgreement if the repetitions last longer than `meets_seconds`.
        """
        end = 0.0
        while True:
            self.node.comes()
            try:
                return super()._initialize_workers(worker_group)
            except RuntimeError as error:
                lost = isinstance(error, DistError) or _UNANSWERED in str(error)
                if self.node.alone or not lost:
                    raise
                end = end or time.monotonic() + self.node.meets_seconds
                if time.monotonic() > end:
                    raise NoAgreement(str(error)) from error
                logging.getLogger(LOGGERS[0]).warning(
                    "a node was lost during the rendezvous; repeating the rendezvous", exc_info=True
                )

    def _shutdown(self, death_sig: Any = signal.SIGKILL, timeout: float = 30) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig, round(timeout if death_sig == signal.SIGKILL else self.grace))


def run_agent(starts: Starts, node: AgentNode, config: LocalLaunch, target: str, args: tuple[Any, ...]) -> int:
    """Run this node's ranks to the end of the job, and return the exit code of `gangline_basics.launch.local.start`."""
    run_dir = starts.run_dir
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    # If the ranks shared the agent's store, restarted ranks would find the addresses of dead ranks in the store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # All nodes have the same number of ranks, so torch need not exchange it.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = UNUSED
    os.environ.setdefault("TORCH_MP_PARALLEL_START", "1")
    files = RankFiles(logs, node)
    spec = WorkerSpec(
        role="train",
        local_world_size=node.ranks,
        entrypoint=worker.enter,
        args=(str(run_dir), target, args, os.getpid()),
        rdzv_handler=node.handler,
        max_restarts=_NO_LIMIT,
        monitor_interval=config.monitor_interval,
    )
    agent = Agent(spec, files, node, starts, config.grace_seconds)
    others = set(multiprocessing.active_children())
    with divert_log(logs / node.log), take_requests() as request:
        goes = False  # if only this node leaves, others may continue, so the rendezvous stays open
        try:
            if agent.run() is None:
                return _as_the_others(starts)
            return _report_done(starts, files)
        except SignalException as stop:
            goes = True
            return _report_signal(starts, files, request.signum or stop.sigval)
        except Stopped as stopped:
            if request.signum:
                return _report_signal(starts, files, request.signum)
            return _explain(stopped, starts, agent.leads)
        except RendezvousTimeoutError:
            goes = True
            few = f"launch.nodes={getattr(config, 'nodes', '1')}: fewer nodes than the minimum joined"
            return _report_unmet(starts, f"{few} within {node.meets_seconds:g} s (launch.join_seconds)")
        except NoAgreement as error:
            goes = True
            return _report_unmet(
                starts,
                f"the rendezvous of the nodes failed for {node.meets_seconds:g} s (launch.join_seconds): {error}",
            )
        except RendezvousClosedError:
            return _as_the_others(starts)
        except (EOFError, OSError):
            if not (code := forkserver.read_exit()):
                raise
            goes = True
            failure = RankFailure(0, "lost", EXIT_FAILURE, failures.explain_lost_server(code))
            print(f"train: {failure.what}", file=sys.stderr, flush=True)
            if node.alone:
                Starts.end(starts.run_dir, files.generation, failure)
            return EXIT_FAILURE
        finally:
            request.heard = True
            if node.alone or not goes:
                node.over()
                with suppress(Exception):  # without a shutdown, other nodes detect the end later
                    node.handler.shutdown()
            _leave_nobody(others)


def _report_done(starts: Starts, files: RankFiles) -> int:
    """Return the exit code after all ranks have returned, from the ending.json of rank 0, or of a new ending."""
    ending = read_ending(starts.run_dir)
    if ending is None or ending.generation != files.generation:
        ending = decide_ending(files.generation, done=True)
    if files.start is not None and files.start.nodes[:1] == (files.node.name,):
        end(starts.run_dir, ending)
    return ending.exit_code


def _report_signal(starts: Starts, files: RankFiles, signum: int) -> int:
    """Return the exit code after signal n: 75 if the ranks saved on request and may be restarted, else 128 + n."""
    # If signals end all nodes of a start, the last node reports the end of the job. Until then, others may continue.
    last = files.start is None or files.node.left(files.generation) == len(files.start.nodes)
    ending = read_ending(starts.run_dir)
    if ending is None or ending.generation != files.generation:
        ending = decide_ending(files.generation, signal=signal.Signals(signum).name)
        last = last and (files.start is not None or files.node.alone)  # other nodes may still begin the first start
    if last:
        end(starts.run_dir, ending)
    return ending.exit_code


def _report_unmet(starts: Starts, what: str) -> int:
    print(
        f"train: {what}\n  To continue:  train resume={shlex.quote(str(starts.run_dir))}", file=sys.stderr, flush=True
    )
    now = generation.read_progress(starts.run_dir).generation
    ending = decide_ending(now, what, failure="lost", exit_code=EXIT_REQUEUE)
    end(starts.run_dir, ending)
    return ending.exit_code


def _as_the_others(starts: Starts) -> int:
    """Return the exit code that another node wrote when it ended the job for all nodes, or EXIT_FAILURE if none did."""
    ending = read_ending(starts.run_dir)
    return EXIT_FAILURE if ending is None else ending.exit_code


class RankFiles(LogsSpecs):
    """Log settings of torch's agent: ranks redirect their own output, and no files are written to the temp folder."""

    def __init__(self, logs: Path, node: AgentNode) -> None:
        super().__init__(str(logs))
        self.logs, self.node = logs, node
        self.start: JobStart | None = None  # newest start
        self.peers: list[str] = []  # addresses of the other nodes; set only on the leading node
        self.one_machine = False  # True if all nodes have the same address, so that loopback is enough

    @property
    def root_log_dir(self) -> str:
        return str(self.logs)

    @property
    def generation(self) -> int:
        """Generation of the newest start; 0 before the first start."""
        return self.start.generation if self.start is not None else 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Set the environment of each rank; torch calls this at each start of the ranks."""
        assert self.start is not None
        for env in envs.values():
            env[VARIABLE] = str(self.start.generation)
            env[NAME] = self.node.name
            env["WORLD_SIZE"] = str(self.start.processes)
            if int(env["RANK"]) >= self.start.processes:
                env[SPARE] = "1"
            if self.one_machine:
                env["MASTER_ADDR"] = LOOPBACK
            if interface := self._find_interface(env["MASTER_ADDR"]):
                env["GLOO_SOCKET_IFNAME"] = interface
            if self.peers and ADDRESS not in os.environ:
                env[ADDRESS] = find_listening_address(env["MASTER_ADDR"], self.peers)
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=dict(nowhere), error_files=dict.fromkeys(envs, os.devnull))

    def _find_interface(self, first: str) -> str | None:
        """Return the network interface for gloo. None: gloo resolves this machine's name to choose an interface."""
        if sys.platform != "linux" or "GLOO_SOCKET_IFNAME" in os.environ:
            return None
        assert self.start is not None
        _, *others = dict.fromkeys(map(get_machine, (self.node.name, *self.start.nodes)))
        if not others:
            return "lo" if first == LOOPBACK else None
        interface = find_interface([address for address in self.peers or [first] if address] + others)
        return None if interface == "lo" else interface  # loopback does not reach other machines


def _explain(stopped: Stopped, starts: Starts, leads: bool) -> int:
    """Return the exit code, and record and print the failure on one node. A user error is raised on every node.

    The leading node of the start records a transient failure. A failure that ends the job is recorded by the first node
    that calls this function, because the other nodes may not have detected the failure.
    """
    failure = stopped.failure
    ending = read_ending(starts.run_dir)
    first = ending is None or ending.generation != stopped.generation
    notes = first and (leads or not failure.is_transient)
    if notes:
        Starts.end(starts.run_dir, stopped.generation, failure)
    elif leads and ending is not None and not _has_exit(starts.run_dir, ending.generation):
        # the ranks have written ending.json
        end(starts.run_dir, ending)
    if failure.kind == "user":
        raise failure.make_error()
    if notes and (failure.is_transient or failure.kind == "lost"):
        print(failures.report(failure, starts.logs), file=sys.stderr, end="", flush=True)
    return failure.exit_code


def _has_exit(run_dir: Path, start: int) -> bool:
    """Return whether events.jsonl has the exit event of the generation `start`."""
    return any(line.get("event") == "exit" and line.get("generation") == start for line in read_events(run_dir))


def _leave_nobody(others: set[BaseProcess]) -> None:
    """Kill all ranks, whatever interrupted the agent. others: earlier children of this process, which survive."""
    for child in set(multiprocessing.active_children()) - others:
        child.kill()
        child.join()
