"""`launch=elastic`: an agent for each of several nodes, in this process or in child processes. Torch-free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.errors import Problem, UserError
from gangline.launch import guard
from gangline.launch.base import Launcher
from gangline.launch.network import name_of_this_node
from gangline.launch.output import outlive_readers
from gangline.launch.signals import exit_code, hand_on, name_of, stop_signals
from gangline.pulse import memory
from gangline.run.directory import RunDirectory
from gangline.run.ending import EXIT_FAILURE, RunEnding, read_ending
from gangline.run.generation import read_progress
from gangline_basics.launch import forkserver, sidecars
from gangline_basics.launch.exclusion import Exclusion
from gangline_basics.launch.local import say
from gangline_basics.launch.nodes import parse_nodes
from gangline_basics.launch.placed import PlacedAddress
from gangline_basics.launch.starts import Starts
from gangline_basics.launch.usable import find_usable
from gangline_basics.launch.worker import WORK

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_basics.launch.config import ElasticLaunch

LOOK_SECONDS = 0.1
AGAIN_SECONDS = 1.0  # delay in seconds before a dead agent is restarted
HOPELESS = 5  # maximum number of consecutive deaths of agents without a start of ranks
HERE = "127.0.0.1"
NODE = "gangline_basics.launch.node"


class UsableRanks:
    """Cache of `find_usable` for one run and at most `most` ranks, because all nodes of a start wait for the result."""

    def __init__(self, run: Run, most: int | None) -> None:
        self._run, self._most = run, most
        self._known: dict[int, tuple[int, list[Problem]]] = {}

    def __call__(self, ranks: int) -> tuple[int, list[Problem]]:
        ranks = min(ranks, self._most or ranks)
        if ranks not in self._known:
            self._known[ranks] = find_usable(self._run, ranks)
        return self._known[ranks]


class ElasticLauncher(Launcher):
    """Launcher of one agent in this process if `launch.agents=1`, or of several agents in child processes."""

    def __init__(self, config: ElasticLaunch, run: Run) -> None:
        self.config, self.run = config, run

    def launch(self, directory: RunDirectory) -> int:
        """Train the run in `directory` with the nodes that rendezvous there, and return the exit code of the job."""
        run_dir = directory.path
        here = self.config.agents or parse_nodes(self.config.nodes)[1]
        if here == 1:
            name = name_of_this_node()
            return run_node(run_dir, self.run, name, address_of(self.run, name))
        forkserver.drop()  # each agent has its own fork server
        return Agents(run_dir, here).watch()


def address_of(run: Run, machine: str) -> str:
    """Return the address at which other nodes reach this node's ranks: `machine`, or loopback if all are simulated."""
    config: ElasticLaunch = run.launch  # type: ignore[assignment]
    return HERE if config.agents is None else machine


def run_node(run_dir: Path, run: Run, name: str, address: str, place: str = "", machines: bool = False) -> int:
    """Run the agent of this node to the end of the job, and return the exit code.

    place     path from the top of the network to the node, "spine.rack0.n1"
    machines  whether the exclusion of the node "MACHINE/NUMBER" excludes all nodes of the machine, because the
              number of a node may change
    """
    config: ElasticLaunch = run.launch  # type: ignore[assignment]
    directory = RunDirectory(run_dir)
    job = directory.share(waits=False)  # `train`, which waits for this process, belongs to the same job
    forkserver.warm(forkserver.find_needed(run))
    running = sidecars.start(sidecars.list_sidecars(run), run_dir, owner=os.getpid())
    try:
        from gangline_basics.launch.elastic import AgentNode, run_agent
        from gangline_basics.launch.meeting import meet_in

        meeting = meet_in(run_dir.resolve(), job, PlacedAddress(address, place) if place else address, config)
        meeting.name(name)
        fewest, _ = parse_nodes(config.nodes)
        hours, patience = config.excluded_hours, config.gather_seconds
        wait = Exclusion(name, run_dir, meeting, fewest, hours, patience, say, machines).wait
        starts = Starts(run_dir.resolve(), config, UsableRanks(run, run.launch.processes), say)
        node = AgentNode(
            name,
            config.count_ranks_of_node(run),
            meeting.handler,
            count=lambda: meeting.store.add("gangline/starts", 1),
            place=place,
            address=address,
            alone=False,
            met=meeting.record_members,
            left=lambda generation: meeting.store.add(f"gangline/left/{generation}", 1),
            replaced=meeting.list_replaced,
            comes=wait,
            meets_seconds=config.join_seconds,
            over=directory.end_job,
            log=f"agent-{name.replace('/', '-')}.log",
        )
        with outlive_readers():
            return run_agent(starts, node, config, WORK, ())
    finally:
        directory.unlock()
        sidecars.stop(running)
        memory.remove(os.getpid())


@dataclass
class Agents:
    """Agents that this command started, restarted after they are killed, as a scheduler does for nodes."""

    run_dir: Path
    count: int
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    again: dict[int, float] = field(default_factory=dict)  # agent -> time of its next start
    codes: dict[int, int] = field(default_factory=dict)  # exit codes of agents that ended by themselves
    stop_signal: int = 0  # number of the signal that asked the job to stop; 0: none
    hopeless: int = 0
    before: RunEnding | None = None  # ending of an earlier job of the run

    def watch(self) -> int:
        """Start the agents, restart killed agents, and return the exit code at the end of the job."""
        asks = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & {*stop_signals()}
        before = {signum: signal.signal(signum, self._hand_on) for signum in asks}
        self.again = dict.fromkeys(range(self.count), 0.0)
        generation = read_progress(self.run_dir).generation
        self.before = read_ending(self.run_dir)
        try:
            while self.running or self.again:
                self._start()
                time.sleep(LOOK_SECONDS)
                for index, process in list(self.running.items()):
                    if (code := process.poll()) is not None:
                        del self.running[index]
                        generation = self._handle_end(index, code, generation)
        finally:
            for process in self.running.values():
                process.kill()
                process.wait()
            for signum, handler in before.items():
                signal.signal(signum, handler)
        return self._compute_code()

    def _start(self) -> None:
        for index, at in list(self.again.items()):
            if time.monotonic() >= at and not self.stop_signal:
                self.again.pop(index, None)
                command = [sys.executable, "-P", "-m", NODE, str(self.run_dir), str(index), str(os.getpid())]
                self.running[index] = subprocess.Popen(command, stdin=subprocess.DEVNULL)
                if self.stop_signal:  # the signal arrived during Popen, and was not sent to this agent
                    guard.send(self.running[index].pid, hand_on(self.stop_signal))

    def _handle_end(self, index: int, code: int, begun: int) -> int:
        now = read_progress(self.run_dir).generation
        self.hopeless = 0 if now > begun else self.hopeless + 1
        ending = self._read_ending()  # an ending with requeue may be of a start that ended only to let a node join
        over = self.stop_signal or (ending is not None and not ending.requeue) or self.hopeless > HOPELESS
        if code < 0 and not over:
            say(f"train: agent {index} of {self.count} was killed by {name_of(-code)}; restarting the agent")
            self.again[index] = time.monotonic() + AGAIN_SECONDS
        else:
            self.codes[index] = exit_code(code)
            if over:
                self.again.clear()
        return now

    def _hand_on(self, signum: int, frame: object) -> None:
        self.stop_signal = self.stop_signal or signum
        self.again.clear()
        for process in self.running.values():
            guard.send(process.pid, hand_on(signum))

    def _read_ending(self) -> RunEnding | None:
        """Return the ending of this job, or None; before the first start, ending.json is from an earlier job."""
        ending = read_ending(self.run_dir)
        return None if ending == self.before else ending

    def _compute_code(self) -> int:
        ending = self._read_ending()
        if ending is None:
            return next((code for code in self.codes.values() if code), EXIT_FAILURE)
        if ending.reason == "mistake":
            raise _make_error(ending)
        return ending.exit_code


def _make_error(ending: RunEnding) -> UserError:
    what, *details = ending.evidence.splitlines()
    error = UserError(what, *details)
    error.exit_code = ending.exit_code
    return error
