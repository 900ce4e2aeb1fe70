"""Step time by kind, from the timeline of the layout's actions and the seconds of each action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import log, sqrt

from gangline.explain.explained import Explained, Kernels, RankExplained, StepAction
from gangline.explain.work import StageWork
from gangline.mesh import DATA_AXES
from gangline_basics.cluster.file import Cluster
from gangline_basics.explain.timeline import ActionTimes, StepTimeline, step_timeline
from gangline_planner.price.matmuls import (
    Rates,
    compute_forward_seconds,
    compute_input_seconds,
    compute_weight_seconds,
)
from gangline_planner.price.sharing import Cores, share_cores
from gangline_planner.price.transfers import compute_transfer_seconds

TOKEN_BYTES = 4  # bytes per token in data sources
KINDS = ("compute", "recompute", "tp", "cp", "fold", "dp", "pp", "bubble", "optimizer", "host", "data", "jitter")


@dataclass(frozen=True)
class StepTime:
    """Time of a step in seconds, on the rank that ends last.

    others    seconds by kind, without the waits of pipeline ranks for each other
    waits     seconds that this rank waits for other pipeline ranks, which compute or send a result
    unknown   lower bound on the seconds to add for model nodes of unknown cost: their FLOPs at the rate of matmuls
    timeline  begin and end of each action, without the work after the last backward pass
    sends     returns by how many seconds the step would be shorter if sends between stages took no time
    """

    seconds: float
    others: dict[str, float]
    waits: float
    unknown: float
    timeline: StepTimeline
    sends: Callable[[], float] = field(compare=False)

    @cached_property
    def kinds(self) -> dict[str, float]:
        """Seconds by kind, whose sum is `seconds`. pp: exposed sends and receives; bubble: all other waits."""
        pp = min(self.waits, max(0.0, self.sends()))
        seconds = {**self.others, "pp": pp, "bubble": self.waits - pp}
        return {kind: seconds[kind] for kind in KINDS}


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch on one stage, without transfers. recompute: recomputed forward passes."""

    forward: float
    inputs: float
    weights: float
    recompute: float

    @classmethod
    def of(cls, work: StageWork, cluster: Cluster, rates: Rates, kernels: Kernels = "fused") -> StageTime:
        name = "elementwise.passes_apart" if kernels == "apart" else "elementwise.passes"
        passes, module = cluster[name] / rates.memory, cluster["module.seconds"]
        pass_seconds, resave_seconds = work.saved_bytes * passes, work.resaved_bytes * passes
        forward, recompute = (
            compute_forward_seconds(work.forward, rates) + pass_seconds,
            compute_forward_seconds(work.recompute, rates) + resave_seconds,
        )
        inputs, weights = (
            compute_input_seconds(work.forward, rates) + 2 * pass_seconds,
            compute_weight_seconds(work.weights, rates),
        )
        late = max(0.0, 2 * work.modules * module - inputs - weights)  # launch time that no kernel hides
        return cls(
            forward=max(forward, work.modules * module),
            inputs=inputs + late,
            weights=weights,
            recompute=max(recompute, work.recomputed_modules * module),
        )

    @property
    def all(self) -> float:
        return self.forward + self.inputs + self.weights + self.recompute


@dataclass(frozen=True)
class Exposed:
    """Seconds of a rank's exposed transfers: per microbatch by kind, at the end of the step, and in the update."""

    forward: dict[str, float]
    backward: dict[str, float]
    end: float
    update: float
    hop: float  # seconds to send a result to the next stage


@dataclass(frozen=True)
class Pieces:
    """Components of a step in seconds: stages, exposed transfers by rank, and times of actions with these transfers."""

    rates: Rates
    stages: list[StageTime]
    waits: list[Exposed]
    times: list[ActionTimes]
    updates: list[float]  # seconds of the optimizer by rank, in which its state crosses memory

    @classmethod
    def of(cls, explained: Explained, cluster: Cluster) -> Pieces:
        rates = Rates.of(cluster, explained.matmul_format, explained.kernels)
        unique_work = {id(work): work for work in explained.work}
        each = {key: StageTime.of(work, cluster, rates, explained.kernels) for key, work in unique_work.items()}
        stages = [each[id(work)] for work in explained.work]
        waits = [measure_exposed(rank, explained, stages, cluster) for rank in explained.ranks]
        times: list[ActionTimes] = [ActionTimes(1.0, 1.0, 1.0)] * len(stages)
        for rank, wait in zip(explained.ranks, waits, strict=True):
            own = sum(stages[stage].all for stage in rank.stages)
            for stage in rank.stages:
                part, time = stages[stage].all / own if own else 1 / len(rank.stages), stages[stage]
                forward, backward = (part * sum(seconds.values()) for seconds in (wait.forward, wait.backward))
                times[stage] = ActionTimes(
                    F=time.forward + forward, I=time.inputs + time.recompute + backward, W=max(time.weights, 1e-12)
                )
        updates = [rank.updated * explained.state_bytes / rates.memory for rank in explained.ranks]
        return cls(rates, stages, waits, times, updates)

    def compute_least_seconds(self, explained: Explained, cluster: Cluster) -> float:
        """Return a lower bound on the step time in seconds, jitter included, without computing the timeline.

        Before the first action of a rank, all earlier stages run; after its last action, the backward passes of the
        earlier stages.
        """
        ready, back = [0.0], [0.0]
        for time in self.times:
            ready.append(ready[-1] + time.F)
            back.append(back[-1] + time.I)
        most = 0.0
        for rank, wait, update in zip(explained.ranks, self.waits, self.updates, strict=True):
            busy = explained.microbatches * sum(self.times[s].F + self.times[s].get_time("B") for s in rank.stages)
            most = max(most, ready[min(rank.stages)] + busy + wait.end + wait.update + update)
            last = rank.turns[-1][-1]
            if last.kind != "W":
                most = max(most, ready[min(rank.stages)] + busy + back[last.stage])
        plain = most / make_cores(explained, cluster).most + cluster["host.seconds"]
        return plain + compute_jitter(plain, explained.mesh.world, cluster)

    def compute_busy_share(self, action: StepAction) -> float:
        """Return the share of an action's time in which the rank computes; in the rest it waits for transfers."""
        time, whole = self.stages[action.stage], self.times[action.stage].get_time(action.kind)
        if action.kind == "F":
            own = time.forward
        elif action.kind == "W":
            own = time.weights
        else:
            own = time.inputs + time.recompute + (time.weights if action.kind == "B" else 0.0)
        return min(1.0, own / whole) if whole else 0.0

    def compute_busiest_seconds(self, explained: Explained) -> float:
        """Return the total seconds of the actions of the busiest rank, exposed transfers included."""
        each = (
            sum(self.times[stage].F + self.times[stage].get_time("B") for stage in rank.stages)
            for rank in explained.ranks
        )
        return explained.microbatches * max(each)


def make_cores(explained: Explained, cluster: Cluster) -> Cores:
    return Cores.of(cluster, explained.topology, explained.mesh.world, len(explained.ranks))


def compute_jitter(seconds: float, world: int, cluster: Cluster) -> float:
    """Return the seconds that the slowest of all ranks adds to a step.

    The maximum of n normal draws is about sqrt(2 ln n) standard deviations above the mean. One part of the deviation
    grows with the step time (clocks, heat); the other part is constant (hosts, allocators, the network).
    """
    deviation = seconds * cluster["jitter.sigma"] + (cluster.get("jitter.seconds") or 0.0)
    return deviation * sqrt(2 * log(max(world, 1)))


def estimate(explained: Explained, cluster: Cluster, stretch: float) -> float:
    """Return the estimated step time in seconds, without computing the timeline.

    stretch  makespan of the timeline of a similar layout, over its `Pieces.compute_busiest_seconds`
    """
    pieces = Pieces.of(explained, cluster)
    late = max(wait.end + wait.update + update for wait, update in zip(pieces.waits, pieces.updates, strict=True))
    plain = pieces.compute_busiest_seconds(explained) * stretch + late + cluster["host.seconds"]
    return plain + compute_jitter(plain, explained.mesh.world, cluster)


def compute_step_time(explained: Explained, cluster: Cluster, pieces: Pieces | None = None) -> StepTime:
    """Return the time of a step. pieces: computed if None. Raises UserError if the cluster file lacks a number."""
    pieces = pieces or Pieces.of(explained, cluster)
    rates, stages, waits, times, updates = pieces.rates, pieces.stages, pieces.waits, pieces.times, pieces.updates
    hop = max(wait.hop for wait in waits)
    cores = make_cores(explained, cluster)
    late = [wait.end + wait.update + update for wait, update in zip(waits, updates, strict=True)]

    def run(hop: float) -> tuple[StepTimeline, list[float]]:
        """Return (timeline, seconds at which each rank ends the step); hop: seconds of a send to the next stage."""
        timeline = share_cores(step_timeline(explained, times, latency=hop), cores, pieces.compute_busy_share, hop)
        return timeline, [spans[-1][2] + behind for spans, behind in zip(timeline.spans, late, strict=True)]

    timeline, ends = run(hop)
    last = max(range(len(ends)), key=ends.__getitem__)
    plain = ends[last] + cluster["host.seconds"]
    data = compute_data_seconds(explained, cluster, plain)
    plain += data
    jitter = compute_jitter(plain, explained.mesh.world, cluster)
    rank, wait, m = explained.ranks[last], waits[last], explained.microbatches
    alike = m * sum(stages[s].all for s in rank.stages)  # seconds if all ranks of the node always compute
    waited = m * (sum(wait.forward.values()) + sum(wait.backward.values()))
    share = min(1.0, (timeline.compute_busy_time(last) - waited) / alike) if cores.most > 1.0 and alike else 1.0
    kinds = {
        "compute": share * m * sum(stages[s].forward + stages[s].inputs + stages[s].weights for s in rank.stages),
        "recompute": share * m * sum(stages[s].recompute for s in rank.stages),
        **{kind: m * (wait.forward.get(kind, 0.0) + wait.backward.get(kind, 0.0)) for kind in ("tp", "cp", "fold")},
        "dp": m * (wait.forward.get("dp", 0.0) + wait.backward.get("dp", 0.0)) + wait.end + wait.update,
        "optimizer": updates[last],
        "host": cluster["host.seconds"],
        "data": data,
        "jitter": jitter,
    }
    rest = plain + jitter - sum(kinds.values())
    idle = rest if rest > 1e-9 * plain else 0.0  # 0 instead of a rounding error
    unknown = (
        sum(work.unknown_flops for work in explained.work)
        * 3
        * explained.microbatches
        / rates.wide
        / len(explained.ranks)
    )
    return StepTime(
        plain + jitter, kinds, idle, unknown, timeline, lambda: ends[last] - max(run(0.0)[1]) if idle else 0.0
    )


def compute_data_seconds(explained: Explained, cluster: Cluster, hidden: float) -> float:
    """Return the seconds that a step waits for data after `hidden` seconds of prefetch; 0 for an unknown read rate."""
    read = cluster.get("storage.read")
    share = explained.tokens / explained.mesh.size(*DATA_AXES)
    return max(0.0, share * TOKEN_BYTES / read - hidden) if read else 0.0


def measure_exposed(rank: RankExplained, explained: Explained, stages: list[StageTime], cluster: Cluster) -> Exposed:
    """Return the seconds of exposed transfers of a rank.

    Transfers that the next computation needs at once are fully exposed. All other transfers are exposed as far as
    computation does not cover them; the last of several transfers at the end of a step is never covered.
    """
    m, share = explained.microbatches, cluster["overlap.share"]
    forward = sum(stages[stage].forward for stage in rank.stages)
    backward = sum(stages[stage].inputs + stages[stage].weights + stages[stage].recompute for stage in rank.stages)
    turn = (
        min(m, len(explained.ranks)) if len(rank.stages) > 1 else 1
    )  # microbatches on a stage before the rank's next stage
    room = {"F": forward, "B": backward, "end": turn * backward, "update": turn * forward}
    waits: dict[str, dict[str, float]] = {"F": {}, "B": {}}
    late, hop = {"end": 0.0, "update": 0.0}, 0.0
    for transfer in sorted(rank.transfers, key=lambda sent: not sent.waits):
        seconds = compute_transfer_seconds(transfer, cluster)
        if transfer.axes == ("pp",) and transfer.when in ("F", "B"):
            hop = max(hop, seconds / max(1, transfer.calls))
            continue
        if transfer.when in waits:
            seconds /= m
        if not transfer.waits:
            # the first part of the transfer is exposed: a matmul on parts of its input starts after it
            pieces = transfer.calls if transfer.when in late else transfer.ranks
            least = seconds / max(1, pieces) if transfer.when in late or transfer.axes == ("tp",) else 0.0
            covered = min(room[transfer.when], share * (seconds - least))
            room[transfer.when] -= covered
            seconds -= covered
        if transfer.when in waits:
            kind = get_transfer_kind(transfer.axes)
            waits[transfer.when][kind] = waits[transfer.when].get(kind, 0.0) + seconds
        else:
            late[transfer.when] += seconds
    return Exposed(waits["F"], waits["B"], late["end"], late["update"], hop)


def get_transfer_kind(axes: tuple[str, ...]) -> str:
    """Return the kind of time of transfers along `axes`: tp, cp, dp, or "fold" for a fold such as ep."""
    if set(axes) <= {"tp"}:
        return "tp"
    if set(axes) <= {"cp"}:
        return "cp"
    return (
        "dp" if set(axes) <= {"dp_replicate", "dp_shard", "cp", "pp", "tp"} or axes[0].startswith("beside") else "fold"
    )
