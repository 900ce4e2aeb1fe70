"""Options of `health=monitors`: monitors, playbooks, alerts, metrics. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from gangline import Part, Problem
from gangline.config import (
    HealthConfig,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Run,
    RunsCode,
    Share,
    Sidecar,
)
from gangline_basics.launch.config import ElasticLaunch
from gangline_health.burn_in.config import PART as BURN_IN
from gangline_health.chaos.config import PART as CHAOS
from gangline_health.hangs.config import HangsOptions
from gangline_health.live.target import explain_malformed, is_url, tells_a_secret
from gangline_health.monitors.straggler_options import StragglersOptions

if TYPE_CHECKING:
    from gangline.comm.base import Comms

ACTIONS = ("note", "warn", "skip", "lower_rate", "roll_back", "restart", "exclude", "stop")

ActionWord = Annotated[str, OneOf(ACTIONS)]


@dataclass
class NumbersOptions:
    """Options of the monitor of loss and gradient norm, which judges a step before its update is applied."""

    on: bool = True  # monitor of loss and gradient norm: spikes, divergence, not finite, zero gradients
    window: Annotated[int, Ge(16)] = 128  # number of past steps from which the noise is estimated
    warmup: Annotated[int, Ge(8)] = 32  # warm-up: number of steps in the window before the monitor reports anything
    spike: Annotated[float, Gt(3)] = 8.0  # threshold of a loss spike, in robust standard deviations above recent steps
    gradient_spike: Annotated[float, Gt(3)] = 10.0  # threshold of a gradient spike, in deviations of log gradient norm
    divergence: Annotated[float, Gt(3)] = 8.0  # threshold of divergence: deviations of the loss above its minimum
    zero_steps: PositiveInt = 10  # number of steps in a row with zero gradients before a warning


@dataclass
class CorruptionOptions:
    """Options of the monitor of silent data corruption: comparisons that must agree to the last bit."""

    on: bool = True  # monitor of silent data corruption (SDC): comparison of the weights of replicas
    every: PositiveInt = 100  # steps between two comparisons of replicas
    gradients: bool = True  # comparison of the gradients of replicas too, before their update is applied
    checkpoints: bool = True  # comparison of weights read with checksums of the save, for saves due by checkpoint.every
    recompute_every: PositiveInt | None = None  # step interval of recomputing a step to compare its bits; null: never


@dataclass
class RankLossesOptions:
    """Options of the monitor of ranks whose own loss differs from the other ranks' losses."""

    on: bool = True  # monitor of ranks whose loss differs from the other ranks' losses
    window: Annotated[int, Ge(32)] = 64  # number of steps from which chance differences between ranks are estimated
    lasting: Annotated[float, Gt(1)] = 2.0  # threshold of a lasting difference, in deviations from the median rank
    spike: Annotated[float, Gt(3)] = 20.0  # threshold of the loss of one step, in deviations from the median rank
    again: PositiveInt = 500  # steps before a rank is reported again


@dataclass
class SavesOptions:
    """Options of the monitor of checkpoint saves that fail."""

    on: bool = True  # monitor of checkpoint saves that fail


@dataclass
class RepeatedOptions:
    """Options of the monitor of starts that fail at the same step as the starts before."""

    on: bool = True  # monitor of starts that fail repeatedly at one step


@dataclass
class MachineOptions:
    """Options of the machine monitor, which runs each probe in a thread of its own."""

    on: bool = True  # monitor of the machine: GPUs, memory, disk, file descriptors, clock
    seconds: PositiveFloat = 60.0  # seconds between two probes
    deadline: PositiveFloat = 10.0  # seconds after which a probe without an answer counts as unknown
    memory: Share = 0.02  # minimum share of the machine's memory that is free; a warning below
    disk: Share = 0.02  # minimum share of free space on the disk of the run directory; a warning below
    descriptors: Share = 0.9  # maximum share of this process's file descriptors in use; a warning above
    skew_seconds: PositiveFloat = 1.0  # maximum clock skew from the median of all ranks, in seconds; a warning above


@dataclass
class Playbook:
    """Answer to one kind of verdict: one action after the other, while the run makes no progress."""

    actions: list[ActionWord] = field(default_factory=lambda: ["warn"])  # actions in order; the last one repeats
    patience: PositiveInt = 1  # verdicts in a row before the first action; until then their own suggestions count
    # minimum steps from the checkpoint (roll_back, restart, exclude) to the first bad step, if one is that old
    back: NonNegativeInt = 0
    skip: bool = True  # skipping of the samples read since the checkpoint (roll_back); false: they are read again
    rate: Annotated[float, Gt(0), Le(1)] = 1.0  # factor of the learning rate after lower_rate, roll_back, restart
    rate_steps: NonNegativeInt = 0  # number of steps at the reduced learning rate

    def list_ineffective(self, usual: Playbook) -> Iterator[tuple[str, str]]:
        """Yield (option, why) for each option that differs from `usual` and has no effect."""
        returns = {"roll_back", "restart", "exclude"} & set(self.actions)
        slows = {"roll_back", "restart", "lower_rate"} & set(self.actions)
        needs = "actions has none of roll_back, restart, "
        if self.back != usual.back and not returns:
            yield "back", f"{needs}exclude"
        if self.skip != usual.skip and not returns:
            yield "skip", f"{needs}exclude"
        if self.rate != usual.rate and not (slows and self.rate_steps):
            yield "rate", f"{needs}lower_rate" if not slows else "rate_steps is 0"
        if self.rate_steps != usual.rate_steps and not (slows and self.rate < 1):
            yield "rate_steps", f"{needs}lower_rate" if not slows else "rate is 1"


@dataclass
class Playbooks:
    """Playbooks by kind of verdict."""

    not_finite: Playbook = field(default_factory=lambda: Playbook(["roll_back", "roll_back", "stop"], patience=3))
    loss_spike: Playbook = field(
        default_factory=lambda: Playbook(["roll_back", "roll_back", "stop"], patience=3, back=100)
    )
    gradient_spike: Playbook = field(
        default_factory=lambda: Playbook(["lower_rate", "roll_back", "stop"], patience=3, rate=0.5, rate_steps=100)
    )
    divergence: Playbook = field(default_factory=lambda: Playbook(["roll_back", "stop"], rate=0.5, rate_steps=1000))
    zero_gradients: Playbook = field(default_factory=lambda: Playbook(["warn"]))
    machine: Playbook = field(default_factory=lambda: Playbook(["warn"]))
    not_saved: Playbook = field(default_factory=lambda: Playbook(["warn"]))
    corruption: Playbook = field(default_factory=lambda: Playbook(["roll_back", "exclude", "stop"], skip=False))
    repeated_failure: Playbook = field(default_factory=lambda: Playbook(["roll_back", "stop"], patience=3, skip=False))
    out_of_memory: Playbook = field(default_factory=lambda: Playbook(["stop"], patience=2))
    rank_loss: Playbook = field(default_factory=Playbook)
    straggler: Playbook = field(default_factory=Playbook)
    slow_rank: Playbook = field(default_factory=lambda: Playbook(["note"]))

    def get_playbook(self, kind: str) -> Playbook | None:
        """Return the playbook for a kind of verdict ("loss-spike"), or None for a kind without one."""
        return getattr(self, kind.replace("-", "_"), None)

    def iterate_by_kind(self) -> Iterator[tuple[str, Playbook]]:
        """Yield (kind of verdict, its playbook)."""
        for each in fields(self):
            yield each.name.replace("_", "-"), getattr(self, each.name)


@dataclass
class Budget:
    """Limit on returns to a checkpoint without progress; only steps that were never done before renew it."""

    orders: PositiveInt = 6  # number of rollbacks and restarts of any kind without progress before the run stops
    progress: PositiveInt = 200  # number of steps past the furthest order after which the budget is renewed


@dataclass
class WatchedHealth(HealthConfig):
    """Health monitors that judge each step before its update; playbooks answer verdicts within a budget."""

    numbers: NumbersOptions = field(default_factory=NumbersOptions)
    corruption: CorruptionOptions = field(default_factory=CorruptionOptions)
    rank_losses: RankLossesOptions = field(default_factory=RankLossesOptions)
    hangs: HangsOptions = field(default_factory=HangsOptions)
    stragglers: StragglersOptions = field(default_factory=StragglersOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)
    saves: SavesOptions = field(default_factory=SavesOptions)
    repeated: RepeatedOptions = field(default_factory=RepeatedOptions)
    # shell command (JSON on stdin) or URL (POST) for alerts: warnings, orders, failures; empty: none
    alert: Annotated[str, RunsCode(data=is_url)] = ""
    metrics_port: Annotated[int, Ge(0), Le(65535)] = 0  # port of the OpenMetrics (Prometheus) server; 0: no server
    metrics_host: str = "127.0.0.1"  # address that the metrics server listens on; 0.0.0.0: all interfaces
    playbooks: Playbooks = field(default_factory=Playbooks)
    budget: Budget = field(default_factory=Budget)

    def check(self, run: Run) -> list[Problem]:
        """Return problems: a playbook without an action, a window that cannot be filled, an invalid alert target."""
        problems = []
        for kind, playbook in self.playbooks.iterate_by_kind():
            place = f"health.monitors.playbooks.{kind.replace('-', '_')}"
            if not playbook.actions:
                problems.append(Problem(f"{place}.actions is empty: name one of {', '.join(ACTIONS)}"))
            if "lower_rate" in playbook.actions and (playbook.rate == 1 or not playbook.rate_steps):
                problems.append(Problem(f"{place} lowers the rate: set {place}.rate below 1 and {place}.rate_steps"))
        if self.corruption.on and self.corruption.recompute_every and not run.deterministic:
            problems.append(
                Problem(
                    f"health.monitors.corruption.recompute_every={self.corruption.recompute_every} compares the bits "
                    "of a step that is done twice.",
                    "Without run.deterministic=on some kernels add in another order each time.",
                    "run.deterministic=on, or health.monitors.corruption.recompute_every=null",
                )
            )
        if self.numbers.warmup > self.numbers.window:
            problems.append(
                Problem(
                    f"health.monitors.numbers.warmup={self.numbers.warmup} steps do not fit into "
                    f"health.monitors.numbers.window={self.numbers.window}"
                )
            )
        if self.metrics_port and find_spec("prometheus_client") is None:
            problems.append(
                Problem(
                    f"health.monitors.metrics_port={self.metrics_port} needs the library prometheus_client, and it is "
                    "not installed.",
                    "It is an extra of gangline-health.",
                    "pip install 'gangline-health[metrics]', or health.monitors.metrics_port=0",
                )
            )
        if why := explain_malformed(self.alert):
            problems.append(
                Problem(
                    f"health.monitors.alert is no URL that something can be posted to: {why}.",
                    "It is a URL (https://host/path) or a command of the shell.",
                    "'health.monitors.alert=${oc.env:HOOK}', with the URL in the variable HOOK",
                )
            )
        if tells_a_secret(self.alert) and "health.monitors.alert" not in run.references:
            problems.append(
                Problem(
                    "health.monitors.alert holds a secret, and what is set is written to the run directory.",
                    "Who knows the path of a webhook can post to it. Put it into the environment and name it here:",
                    "'health.monitors.alert=${oc.env:HOOK}'",
                )
            )
        return [*problems, *(self.hangs.find_problems(run) if self.hangs.on else ())]

    def list_sidecars(self, run: Run) -> list[Sidecar]:
        sidecars = []
        if self.hangs.on:
            watch = "gangline_health.hangs.watch:main"
            sidecars.append(Sidecar(name="watch", target=watch, args=(asdict(self.hangs),)))
        if self.alert:
            sidecars.append(Sidecar(name="alert", target="gangline_health.live.alerts:main", args=(time.time(),)))
        if self.metrics_port:
            where = (self.metrics_host, self.metrics_port)
            sidecars.append(Sidecar(name="metrics", target="gangline_health.live.serve:main", args=where))
        return sidecars

    def wrap(self, run: Run, comms: Comms) -> Comms:
        if not (self.corruption.on and self.corruption.recompute_every):
            return comms
        from gangline_health.monitors.recompute import record_comms

        return record_comms(comms)

    def list_notices(self, run: Run) -> list[str]:
        """Return notices on playbooks: options without effect, no checkpoint to return to, or only ones too recent."""
        return [*self._report_ineffective(run), *self._report_no_checkpoint(run)]

    def _report_ineffective(self, run: Run) -> list[str]:
        notices = []
        usual, elastic = dict(Playbooks().iterate_by_kind()), isinstance(run.launch, ElasticLaunch)
        for kind, playbook in self.playbooks.iterate_by_kind():
            place = f"health.monitors.playbooks.{kind.replace('-', '_')}"
            for option, why in playbook.list_ineffective(usual[kind]):
                notices.append(f"{place}.{option} has no effect: {place}.{why}")
            if "exclude" in playbook.actions and playbook.actions != usual[kind].actions and not elastic:
                notices.append(
                    f"{place}.actions: exclude only restarts the ranks here; other nodes take over under elastic"
                )
        return notices

    def _report_no_checkpoint(self, run: Run) -> list[str]:
        returns = [kind for kind, playbook in self.playbooks.iterate_by_kind() if "roll_back" in playbook.actions]
        if run.checkpoint.every is None and returns:
            return [
                f"health=monitors: the playbooks for {', '.join(returns)} go back to a checkpoint, and this run saves "
                "none before its end; without one they stop the run. Set checkpoint.every"
            ]
        every, count = run.checkpoint.every, getattr(run.checkpoint, "keep_last", None)
        if not isinstance(every, int) or count is None or getattr(run.checkpoint, "keep_every", None) is not None:
            return []
        distances = {
            f"health.monitors.playbooks.{kind.replace('-', '_')}.back": playbook.back
            for kind, playbook in self.playbooks.iterate_by_kind()
            if kind in returns
        }
        if self.corruption.on and "corruption" in returns and run.launch.count_ranks(run) > 1:
            distances["health.monitors.corruption.every"] = self.corruption.every
        short = {place: steps for place, steps in distances.items() if steps > every * count}
        if not short:
            return []
        settings = ", ".join(f"{place}={steps}" for place, steps in short.items())
        return [
            f"health=monitors: checkpoint.every={every} checkpoint.keep_last={count} keep the checkpoints of "
            f"{every * count} steps, and {settings} may want an older one. "
            f"Set checkpoint.keep_last={-(-max(short.values()) // every)}"
        ]


PARTS = (
    Part(
        name="monitors",
        config=WatchedHealth,
        build="gangline_health.check:WatchCheck",
        summary="spikes, divergence, not finite: found before a step is applied, and answered",
    ),
    CHAOS,
    BURN_IN,
)
