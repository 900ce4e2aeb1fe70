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

    on: bool = True  # monitor of loss and gradient norm: spikes, divergence, NaN or inf, zero gradients
    window: Annotated[int, Ge(16)] = 128  # window of the noise estimate: number of past steps without a spike
    # warm-up: number of steps in the window before spikes and divergence are reported
    warmup: Annotated[int, Ge(8)] = 32
    # loss-spike threshold, in robust standard deviations above the median loss of recent steps
    spike: Annotated[float, Gt(3)] = 8.0
    # gradient-spike threshold, in robust standard deviations of the log gradient norm above its recent median
    gradient_spike: Annotated[float, Gt(3)] = 10.0
    # divergence threshold: rise of the recent median loss above its minimum, in robust standard deviations
    divergence: Annotated[float, Gt(3)] = 8.0
    zero_steps: PositiveInt = 10  # number of consecutive steps with zero gradients before a warning


@dataclass
class CorruptionOptions:
    """Options of the monitor of silent data corruption, which compares values that must be bitwise equal."""

    on: bool = True  # monitor of silent data corruption (SDC), by checksums of the weights of replicas
    every: PositiveInt = 100  # step interval between two comparisons of replicas
    gradients: bool = True  # comparison of the gradients of replicas in addition to their weights
    # comparison of restored weights with their checksums at the save; only for saves due by checkpoint.every
    checkpoints: bool = True
    # step interval at which a step is computed twice to compare its bits; null: never
    recompute_every: PositiveInt | None = None


@dataclass
class RankLossesOptions:
    """Options of the monitor of ranks whose own loss differs from the losses of the other ranks."""

    on: bool = True  # monitor of ranks whose own loss differs from the losses of the other ranks
    window: Annotated[int, Ge(32)] = 64  # number of steps over which chance loss differences are estimated
    # threshold of a sustained loss difference from the median rank, in robust standard deviations
    sustained_score: Annotated[float, Gt(1)] = 2.0
    # threshold of the loss difference from the median rank in one step, in robust standard deviations
    spike_score: Annotated[float, Gt(3)] = 20.0
    # minimum number of steps between two reports that the training loss of the same rank deviates
    report_every: PositiveInt = 500


@dataclass
class SavesOptions:
    """Options of the monitor of checkpoint saves that fail."""

    on: bool = True  # monitor of checkpoint saves that fail


@dataclass
class RepeatedOptions:
    """Options of the monitor of starts that fail repeatedly at the same step."""

    on: bool = True  # monitor of starts that fail repeatedly at the same step


@dataclass
class MachineOptions:
    """Options of the machine monitor, which runs each probe in a separate thread."""

    on: bool = True  # monitor of the machine: GPUs, memory, disk, file descriptors, clock
    seconds: PositiveFloat = 60.0  # interval between two runs of a machine probe, in seconds
    deadline: PositiveFloat = 10.0  # timeout of a machine probe in seconds; then its result is unknown
    memory: Share = 0.02  # minimum share of the machine's memory that is available, 0 to 1; less: a warning
    disk: Share = 0.02  # minimum share of the run directory's disk that is free, 0 to 1; less: a warning
    descriptors: Share = 0.9  # maximum share of a rank's file descriptors that are open, 0 to 1; more: a warning
    skew_seconds: PositiveFloat = 1.0  # maximum clock skew of a rank from the median rank, in seconds; more: a warning


@dataclass
class Playbook:
    """Answer to one kind of verdict: actions, each taken if the run made no progress after the previous action."""

    actions: list[ActionWord] = field(default_factory=lambda: ["warn"])  # actions in order; the last action repeats
    # number of consecutive steps with this verdict until the playbook acts; before, the verdict's suggestion applies
    patience: PositiveInt = 1
    # minimum distance of the restored checkpoint from the first bad step, in steps, if possible
    back: NonNegativeInt = 0
    # after roll_back: skipping of the samples read since the checkpoint; false: these samples are read again
    skip: bool = True
    rate: Annotated[float, Gt(0), Le(1)] = 1.0  # learning-rate factor after lower_rate, roll_back or restart
    rate_steps: NonNegativeInt = 0  # number of steps for which the learning rate is multiplied by `rate`

    def list_ineffective(self, usual: Playbook) -> Iterator[tuple[str, str]]:
        """Yield (option, reason) for each option that differs from its value in `usual` and has no effect."""
        returns = {"roll_back", "restart", "exclude"} & set(self.actions)
        slows = {"roll_back", "restart", "lower_rate"} & set(self.actions)
        needs = "actions contains none of roll_back, restart, "
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
    """Playbook of each kind of verdict."""

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
    """Limit on rollbacks and restarts without progress; `progress` steps of progress reset the budget."""

    # maximum number of rollbacks and restarts without progress; the next such response stops the run
    responses: PositiveInt = 6
    # number of steps of progress that reset the budget, counted from the highest step with a rollback or restart
    progress: PositiveInt = 200


@dataclass
class WatchedHealth(HealthConfig):
    """Options of the health monitors, which judge each step before its update.

    Playbooks choose the action for a verdict, within a budget of rollbacks and restarts.
    """

    numbers: NumbersOptions = field(default_factory=NumbersOptions)
    corruption: CorruptionOptions = field(default_factory=CorruptionOptions)
    rank_losses: RankLossesOptions = field(default_factory=RankLossesOptions)
    hangs: HangsOptions = field(default_factory=HangsOptions)
    stragglers: StragglersOptions = field(default_factory=StragglersOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)
    saves: SavesOptions = field(default_factory=SavesOptions)
    repeated: RepeatedOptions = field(default_factory=RepeatedOptions)
    # shell command (JSON on stdin) or URL (POST) for alerts: warnings, responses, failures; empty: no alerts
    alert: Annotated[str, RunsCode(data=is_url)] = ""
    metrics_port: Annotated[int, Ge(0), Le(65535)] = 0  # TCP port of the OpenMetrics (Prometheus) server; 0: no server
    metrics_host: str = "127.0.0.1"  # address that the metrics server listens on; 0.0.0.0: all interfaces
    playbooks: Playbooks = field(default_factory=Playbooks)
    budget: Budget = field(default_factory=Budget)

    def check(self, run: Run) -> list[Problem]:
        """Return problems: invalid playbooks or windows, a missing library, an invalid or secret alert target."""
        problems = []
        for kind, playbook in self.playbooks.iterate_by_kind():
            place = f"health.monitors.playbooks.{kind.replace('-', '_')}"
            if not playbook.actions:
                problems.append(Problem(f"{place}.actions is empty: choose from {', '.join(ACTIONS)}"))
            if "lower_rate" in playbook.actions and (playbook.rate == 1 or not playbook.rate_steps):
                problems.append(
                    Problem(f"{place}.actions has lower_rate: set {place}.rate below 1 and {place}.rate_steps")
                )
        if self.corruption.on and self.corruption.recompute_every and not run.deterministic:
            problems.append(
                Problem(
                    f"health.monitors.corruption.recompute_every={self.corruption.recompute_every} needs "
                    "run.deterministic=on.",
                    "Recomputation compares bits, and some kernels sum in a different order each time.",
                    "run.deterministic=on, or health.monitors.corruption.recompute_every=null",
                )
            )
        if self.numbers.warmup > self.numbers.window:
            problems.append(
                Problem(
                    f"health.monitors.numbers.warmup={self.numbers.warmup} must be at most "
                    f"health.monitors.numbers.window={self.numbers.window}"
                )
            )
        if self.metrics_port and find_spec("prometheus_client") is None:
            problems.append(
                Problem(
                    f"health.monitors.metrics_port={self.metrics_port} needs the library prometheus_client, which is "
                    "not installed.",
                    "The library is in the extra metrics of gangline-health.",
                    "pip install 'gangline-health[metrics]', or health.monitors.metrics_port=0",
                )
            )
        if why := explain_malformed(self.alert):
            problems.append(
                Problem(
                    f"health.monitors.alert is not a valid http or https URL: {why}.",
                    "Alerts go to a URL (https://host/path) or to a shell command.",
                    "'health.monitors.alert=${oc.env:HOOK}', with the URL in the environment variable HOOK",
                )
            )
        if tells_a_secret(self.alert) and "health.monitors.alert" not in run.references:
            problems.append(
                Problem(
                    "health.monitors.alert contains a secret: a URL with a path, a query or a user.",
                    "Option values are written to the run directory, and each reader of this URL could post to it.",
                    "'health.monitors.alert=${oc.env:HOOK}', with the URL in the environment variable HOOK",
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
        """Return notices on playbooks: options without effect, and missing or too recent checkpoints to return to."""
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
                    f"{place}.actions: exclude only restarts ranks with this launcher; launch=elastic replaces nodes"
                )
        return notices

    def _report_no_checkpoint(self, run: Run) -> list[str]:
        returns = [kind for kind, playbook in self.playbooks.iterate_by_kind() if "roll_back" in playbook.actions]
        if run.checkpoint.every is None and returns:
            return [
                f"health=monitors: the playbooks for {', '.join(returns)} restore a checkpoint, but this run saves "
                "only at its end, so these playbooks stop the run. Set checkpoint.every"
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
            f"health=monitors: checkpoint.every={every} checkpoint.keep_last={count} keep the checkpoints of the last "
            f"{every * count} steps, but {settings} may need an older checkpoint. "
            f"Set checkpoint.keep_last={-(-max(short.values()) // every)}"
        ]


PARTS = (
    Part(
        name="monitors",
        config=WatchedHealth,
        build="gangline_health.check:WatchCheck",
        capabilities={"time_account": "gangline_health.ledger.section:compute_account"},
        summary="monitors for spikes, NaN, silent data corruption, hangs and stragglers, with playbooks",
        synonyms={
            "budget.responses": "orders",
            "rank_losses.sustained_score": "lasting",
            "rank_losses.spike_score": "spike",
            "rank_losses.report_every": "again",
            "stragglers.min_ratio": "slower",
            "stragglers.min_score": "score",
            "stragglers.min_seconds": "least_seconds",
            "stragglers.report_every": "again",
            "stragglers.steady_ratio": "steadily",
        },
    ),
    CHAOS,
    BURN_IN,
)
