"""Decision on each start of the ranks: generation, training ranks, spare ranks, or the end of the job. Torch-free.

The leading node of a start decides from files of the run directory, and sends the decision to the other nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gangline.errors import EXIT_USER_ERROR, Problem, UserError
from gangline.run import attempts, generation
from gangline.run.ending import EXIT_FAILURE, RunEnding, clear_ending, read_ending, write_ending
from gangline.run.events import Events, read_events
from gangline.run.generation import Progress
from gangline_basics.launch import failures
from gangline_basics.launch.before import StartBefore, identify_config, start_before
from gangline_basics.launch.config import LocalLaunch
from gangline_basics.launch.failures import RankFailure

# number of ranks -> (number of them that a layout can use, problems of using all)
Usable = Callable[[int], tuple[int, list[Problem]]]


@dataclass(frozen=True)
class JobStart:
    """Decision on one start of the ranks, equal on every node. stop: the reason to start no ranks, or None."""

    generation: int
    nodes: tuple[str, ...]
    processes: int
    spares: int
    stop: RankFailure | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, content: dict[str, Any]) -> JobStart:
        """Return the start that `to_dict` wrote, also after JSON."""
        stop = content["stop"] and RankFailure(**content["stop"])
        return cls(**{**content, "nodes": tuple(content["nodes"]), "stop": stop})


class Starts:
    """Decisions on the starts of a job, on the leading node."""

    def __init__(self, run_dir: Path, config: LocalLaunch, usable: Usable, say: Callable[[str], None]) -> None:
        self.run_dir, self.config, self.usable, self.say = run_dir, config, usable, say
        self.logs = run_dir / "logs"
        self.places: Sequence[str] = ()  # network paths of the nodes of the next start
        # when the end of the previous start was detected: (UTC timestamp, monotonic seconds)
        self.found: tuple[str, float] | None = None

    def note_end(self) -> None:
        """Record the current time as the detected end of the previous start's ranks."""
        self.found = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic()

    def begin(self, nodes: Sequence[str], ranks: int, first: bool) -> JobStart:
        """Return the next start, on `nodes` with `ranks` ranks. first: whether it is the first start of this job."""
        before = self._read_previous(first)
        now_there = set(nodes)
        failure = None if first else failures.find_first(self.logs, before.get("generation", 0))
        earlier = start_before(self.run_dir) if first else StartBefore()
        why, evidence = self._explain(before, now_there, failure)
        counts = why in ("rank", "node", "response")
        again = earlier.failed and not earlier.counted
        now = generation.advance(self.run_dir, counts or again, first, earlier.failed, why == "response")
        if first:
            failures.clear(self.logs)
        clear_ending(self.run_dir)
        usable, reasons = self.usable(ranks)
        stop = self.stop(now, failure, evidence, stays=why == "rank") if counts or failure is not None else None
        if stop is None and not usable:
            error = UserError.of(reasons)
            stop = RankFailure(0, "user", EXIT_USER_ERROR, error.what, list(error.details))
        start = JobStart(now.generation, tuple(nodes), usable, ranks - usable, stop)
        if stop is None:
            member = failure.member if failure is not None and why == "rank" else earlier.member
            self._tell(start, why, evidence or earlier.evidence, now, member, earlier.after)
        return start

    def stop(
        self, now: Progress, failure: RankFailure | None, evidence: str = "", stays: bool = False
    ) -> RankFailure | None:
        """Return why ranks are not restarted after `failure` (None: not recorded by a rank), or None for a restart.

        Reasons are a user error, a verdict that stops the run, and an exhausted budget of restarts. now: progress that
        already counts the next restart. stays: whether the set of nodes is unchanged.
        """
        preempted = failure is not None and failure.preempted
        if preempted and not stays:
            return None  # a node was asked to leave after its ranks saved a checkpoint
        if failure is not None and not failure.is_transient and not preempted:
            return failure
        last = failure or RankFailure(
            0, "lost", EXIT_FAILURE, evidence or "a rank was lost, and no rank recorded a reason"
        )
        most = self.config.max_restarts
        if last.kind != "restart" and most is not None and now.failed > most:
            return last
        used_up = now.futile > 0 and now.futile_restarts >= self.config.futile_restarts
        if used_up and (most is None or most > 0 or last.kind == "restart"):
            self.say(
                f"train: giving up after {now.futile_restarts} restarts without progress past step {now.best} "
                "(launch.futile_restarts)"
            )
            return last
        return None

    def predict(self, failure: RankFailure | None) -> Progress:
        """Return the result that `generation.advance` would have after `failure` (None: no rank recorded it)."""
        now = generation.read_progress(self.run_dir)
        step = max(now.step, now.best)
        futile = 0 if step > now.best else now.futile + 1
        response = failure is not None and failure.kind == "restart"
        return Progress(now.generation + 1, step, step, futile, now.restarts + 1, now.responses + response)

    @staticmethod
    def end(run_dir: Path, start: int, stop: RankFailure) -> None:
        """Write ending.json and the exit event of events.jsonl for the failure `stop` of generation `start`."""
        lines = attempts.read(run_dir)
        end(run_dir, stop.make_ending(start, lines[-1].exclude if lines else ()))

    def _read_previous(self, first: bool) -> dict[str, Any]:
        """Return the previous launch event of this job, or {}."""
        lines = [] if first else [line for line in read_events(self.run_dir) if line.get("event") == "launch"]
        return lines[-1] if lines else {}

    def _explain(self, before: dict[str, Any], nodes: set[str], failure: RankFailure | None) -> tuple[str, str]:
        if not before:
            return "start", ""
        missing_nodes, come = set(before["nodes"]) - nodes, nodes - set(before["nodes"])
        if failure is not None and failure.kind == "restart":
            return "response", failure.what
        if missing_nodes:
            return "node", f"nodes lost: {', '.join(sorted(missing_nodes))}"
        if failure is not None and failure.is_transient:
            return "rank", failure.evidence
        if come:
            return "joined", f"nodes joined: {', '.join(sorted(come))}"
        if failure is not None and failure.preempted:  # the signal was sent to a rank, not to a launcher
            ending = read_ending(self.run_dir)
            return "rank", f"a rank received a stop request: {ending.evidence if ending else 'the run is saved'}"
        return "rank", failure.evidence if failure is not None else "a rank was lost"

    def _tell(self, start: JobStart, why: str, evidence: str, now: Progress, member: str, after: str) -> None:
        end_time, found_monotonic = self.found or (None, None)
        events = Events(self.run_dir, start.generation, by="launcher")
        events.write(
            "launch",
            nodes=list(start.nodes),
            places=list(self.places),
            processes=start.processes,
            spares=start.spares,
            why=why,
            evidence=evidence,
            found=end_time,
            found_monotonic=found_monotonic,
            futile=now.futile,
            member=member,
            after=after,
            config=identify_config(self.run_dir),
        )
        events.close()
        if why != "start":
            spares = f", {start.spares} as spares" if start.spares else ""
            on = f" on {len(start.nodes)} nodes" if len(start.nodes) > 1 else ""
            of = f" of {self.config.max_restarts}" if self.config.max_restarts else ""
            ask = "; new workers were requested" if why == "response" else ""
            number = f"restart {now.failed}{of}" if why in ("rank", "node") else "ranks restarted"
            self.say(f"train: {evidence}{ask}; {number}" + (f": {start.processes} processes{on}{spares}" if on else ""))


def end(run_dir: Path, ending: RunEnding) -> None:
    """Write ending.json, and the exit event of events.jsonl."""
    write_ending(run_dir, ending)
    events = Events(run_dir, ending.generation, by="launcher")
    content = {"reason": ending.reason, "exit_code": ending.exit_code, "requeue": ending.requeue}
    events.write("exit", **content, evidence=ending.evidence)
    events.close()
