"""Monitor of stragglers: reports slow ranks, their slowest phase, since when, and the cost per step. Torch-free.

The monitor reads `rank_phases` of the step record: the seconds of each rank's own work, without its waits for other
ranks. The slowest rank sets the step time, and waits the least. So the median of a rank's own seconds over a window is
compared with the median of its peers, the ranks that do equal work, in robust standard deviations between ranks.
Different pipeline stages are not compared: the stage with the head takes longer.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gangline.health import Action, Verdict
from gangline_health.monitors.base import Monitor
from gangline_health.monitors.peers import Peers
from gangline_health.monitors.steadily_slow import SlowRanks
from gangline_health.monitors.straggler_options import StragglersOptions
from gangline_health.robust import NORMAL

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comms, Store
    from gangline.record import StepRecord
    from gangline.runtime import Runtime

# phases of a rank's own work, without saves, whose time depends on the disk
OWN = ("data", "forward", "backward", "optimizer", "other")


class StragglersMonitor(Monitor):
    """Monitor that keeps the seconds of each rank in each phase, for the last steps."""

    name = "stragglers"

    def __init__(self, options: StragglersOptions) -> None:
        self.options, self.peers = options, Peers()
        self.rows: list[dict[str, list[float]]] = []  # for each step: phase -> seconds by rank
        self.previous: StepRecord | None = None
        self.since: dict[str, int] = {}  # slow rank -> first step of the window in which it was first slow
        self.told: dict[str, int] = {}  # slow rank -> step of its last verdict
        self.steady = SlowRanks(options.steady_ratio, options.steady_steps)

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        mesh = runtime.registry.mesh
        self.peers = Peers(tuple(mesh.coordinate(rank).get("pp", 0) for rank in range(mesh.world)))
        self.steady.peers = self.peers

    def describe(self) -> str:
        if len(self.peers.stages) > 1 and len(set(self.peers.stages)) == len(self.peers.stages):
            return "not compared: no two ranks do equal work"
        of = "their stage" if len(set(self.peers.stages)) > 1 else "all ranks"
        return f"ranks {self.options.min_ratio:g} times slower than the median of {of} over {self.options.window} steps"

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        # ranks exchange the values of a step after checks observe its record, so they are read in the next step
        previous, self.previous = self.previous, record
        if previous is not None:
            yield from self._judge(previous)

    def _judge(self, record: StepRecord) -> Iterable[Verdict]:
        phases = record.rank_phases
        if phases is None or len(next(iter(phases.values()))) < 2:
            return
        if self.rows and len(self.rows[0]["data"]) != len(phases["data"]):
            self.rows, self.since, self.told = [], {}, {}
        self.rows = [*self.rows, {phase: phases[phase] for phase in OWN}][-self.options.window :]
        ranks = range(len(phases["data"]))
        for rank, times in self.steady.add([sum(phases[phase][rank] for phase in OWN) for rank in ranks]).items():
            yield self._report_slow_rank(rank, times, record)
        if len(self.rows) < self.options.window:
            return
        own = self._compute_medians(OWN)
        slow = set()
        for rank, score in self._find_slow_ranks(own):
            slow.add(str(rank))
            since = self.since.setdefault(str(rank), record.step - self.options.window + 1)
            last = self.told.get(str(rank))
            if last is None or record.step - last >= self.options.report_every:
                self.told[str(rank)] = record.step
                yield self._report_straggler(rank, score, since, own, record)
        self.since = {rank: step for rank, step in self.since.items() if rank in slow}
        self.told = {rank: step for rank, step in self.told.items() if rank in slow}

    def _compute_medians(self, phases: Iterable[str]) -> list[float]:
        """Return for each rank the median, over the window, of the sum of its seconds in `phases`."""
        names = tuple(phases)
        ranks = range(len(self.rows[0]["data"]))
        return [statistics.median(sum(row[name][rank] for name in names) for row in self.rows) for rank in ranks]

    def _find_slow_ranks(self, own: list[float]) -> list[tuple[int, float]]:
        """Return (rank, score in robust standard deviations) of each rank that is above all straggler thresholds."""
        usual, ranks = self.peers.compute_peer_medians(own), range(len(own))
        compared = [rank for rank in ranks if usual[rank] > 0 and len(self.peers.find_peers(rank, len(own))) > 1]
        if not compared:
            return []
        # noise is estimated over all ranks, because a stage may have few ranks
        spread = NORMAL * statistics.median(abs(own[rank] / usual[rank] - 1) for rank in compared)
        slow_ranks = []
        for rank in compared:
            seconds, middle = own[rank], usual[rank]
            more, noise = seconds - middle, max(spread, 0.02, 1e-6 / middle)
            score = more / middle / noise
            known = str(rank) in self.since  # a slow rank stays slow until its excess is below half the threshold
            slower = 1 + (self.options.min_ratio - 1) / (2 if known else 1)
            far = seconds >= slower * middle and score >= self.options.min_score
            if far and more >= self.options.min_seconds:
                slow_ranks.append((rank, score))
        return slow_ranks

    def _report_straggler(self, rank: int, score: float, since: int, own: list[float], record: StepRecord) -> Verdict:
        middle, peers = self.peers.compute_peer_medians(own)[rank], self.peers.find_peers(rank, len(own))
        excess = {}
        for phase in OWN:
            each = self._compute_medians((phase,))
            excess[phase] = each[rank] - self.peers.compute_peer_medians(each)[rank]
        phase = max(excess, key=lambda name: excess[name])
        next_slowest = max(seconds for other, seconds in enumerate(own) if other != rank)
        cost = max(0.0, own[rank] - next_slowest)  # seconds by which a step would be shorter without this rank
        step = (record.rank_seconds or {}).get("max", record.step_seconds)  # equal on all ranks, as verdicts must be
        share = cost / step if step else 0.0
        where = " of its stage" if len(peers) < len(own) else ""
        evidence = (
            f"rank {rank} works {own[rank]:.3f} s per step, the median of {len(peers)} ranks{where} is {middle:.3f} s "
            f"({score:.1f} robust deviations), since step {since}; largest excess in {phase} "
            f"({excess[phase]:+.3f} s); cost per step: {cost:.3f} s, {share:.0%}"
        )
        details = {
            "rank": rank, "phase": phase, "since": since, "cost_seconds": cost, "score": score, "step": record.step,
            "exclude": f"rank {rank}",
        }  # fmt: skip
        return Verdict("straggler", f"rank {rank}", 0.9, evidence, Action.WARN, details=details)

    def _report_slow_rank(self, rank: int, times: float, record: StepRecord) -> Verdict:
        steps = self.options.steady_steps
        evidence = (
            f"rank {rank} works {times - 1:.1%} longer per step than the median rank of its stage, in each tenth of "
            f"{steps} steps; the job is slower by up to this share"
        )
        details = {"rank": rank, "times": times, "step": record.step, "exclude": f"rank {rank}"}
        return Verdict("slow-rank", f"rank {rank}", 0.8, evidence, Action.NOTE, details=details)

    def load_state(self, state: dict[str, Any]) -> None:
        """Clear the window, because another start has other processes, perhaps on other machines."""
        self.previous = None
        self.rows, self.since, self.told = [], {}, {}
        self.steady = SlowRanks(self.options.steady_ratio, self.options.steady_steps, self.peers)
