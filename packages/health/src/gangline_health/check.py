"""Health check `health=monitors`: runs monitors and answers verdicts by playbooks. Removes a monitor that raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gangline.health import Action, Agreed, HealthCheck, Response, Verdict, run_within
from gangline_health import playbooks
from gangline_health.config import WatchedHealth
from gangline_health.hangs import flight
from gangline_health.monitors.base import Monitor
from gangline_health.monitors.corruption import CorruptionMonitor
from gangline_health.monitors.machine import MachineMonitor
from gangline_health.monitors.numbers import NumbersMonitor
from gangline_health.monitors.rank_losses import RankLossesMonitor
from gangline_health.monitors.repeated import RepeatedMonitor
from gangline_health.monitors.saves import SavesMonitor
from gangline_health.monitors.stragglers import StragglersMonitor

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comm, Comms, Store
    from gangline.config import Run
    from gangline.optimizer import Optimizer
    from gangline.record import StepRecord
    from gangline.runtime import Runtime


class WatchCheck(HealthCheck):
    """Health check that runs the monitors that the configuration enables, in a fixed order."""

    def __init__(self, config: WatchedHealth, run: Run) -> None:
        self.config, self.run_dir = config, run.job.dir
        self.monitors: dict[str, Monitor] = {}
        if config.numbers.on:
            tokens = run.batch.global_size * run.batch.sequence_length
            self._add(NumbersMonitor(config.numbers, run.precision.finds_scale, tokens))
        every = run.checkpoint.every if isinstance(run.checkpoint.every, int) else None
        if config.corruption.on:
            self._add(CorruptionMonitor(config.corruption, every))
        if config.rank_losses.on:
            self._add(RankLossesMonitor(config.rank_losses))
        if config.stragglers.on:
            self._add(StragglersMonitor(config.stragglers))
        if config.saves.on:
            self._add(SavesMonitor())
        if config.repeated.on:
            self._add(RepeatedMonitor(run.job.dir, every))
        if config.machine.on:
            self._add(MachineMonitor(config.machine, run.job.dir or "."))
        self.failed: dict[str, str] = {}  # monitor name -> its exception on this rank, until `observe` reports it
        self.silent: set[str] = set()  # names of monitors that raised on this rank and are no longer called
        self.rank, self.step = 0, 0

    def _add(self, monitor: Monitor) -> None:
        self.monitors[monitor.name] = monitor

    def attach(
        self, runtime: Runtime, optimizer: Optimizer, comms: Comms, store: Store | None, device: torch.device
    ) -> None:
        self.rank = comms.rank
        if self.config.hangs.on and self.run_dir is not None:
            flight.listen(self.run_dir, comms.rank)
        for monitor in self.monitors.values():
            monitor.attach(runtime, comms, store, device)

    # --- called by core ----------------------------------------------------------------------------------------------

    def before_run(self) -> Iterable[Verdict]:
        if self.rank == 0:
            descriptions = {name: monitor.describe() for name, monitor in self.monitors.items()}
            answers = {kind: list(one.actions) for kind, one in self.config.playbooks.iterate_by_kind()}
            details = {"monitors": descriptions, "playbooks": answers}
            yield Verdict("monitors", "the run", 1.0, self.describe_start(), Action.NOTE, details=details)
        yield from self._ask_all(lambda monitor: monitor.before_run())

    def describe_start(self) -> str:
        """Return the evidence of the note at the start of a run: the monitors, and what they cannot monitor here."""
        unknown = "".join(
            f"; not monitored: {text}" for monitor in self.monitors.values() if (text := monitor.explain_unknown())
        )
        names = ", ".join(self.monitors) or "none"
        playbooks = len(list(self.config.playbooks.iterate_by_kind()))
        return f"{names}; {playbooks} playbooks (details: events.jsonl){unknown}"

    def before_step(self, step: int) -> None:
        self.step = step

        def begin_step(monitor: Monitor) -> Iterable[Verdict]:
            monitor.before_step(step)
            return ()

        self._ask_all(begin_step)

    def before_update(self, loss: float, grad_norm: float) -> Iterable[Verdict]:
        yield from self._ask_all(lambda monitor: monitor.before_update(self.step, loss, grad_norm))

    def collective(self, comm: Comm) -> None:
        for name, monitor in self.monitors.items():
            with run_within(name):
                monitor.collective(comm, self.step)

    def leave_out(self, part: str) -> bool:
        return self.monitors.pop(part, None) is not None

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        yield from self._ask_all(lambda monitor: monitor.observe(record))
        for name, why in self.failed.items():
            evidence = f"health.monitors.{name} raised an exception and is disabled from step {record.step} on: {why}"
            details = {"monitor": name, "step": record.step}
            yield Verdict("check-failed", f"rank {self.rank}", 1.0, evidence, Action.WARN, details=details)
        self.failed = {}

    def respond(self, agreed: Agreed, record: StepRecord | None) -> Response | None:
        for failure in agreed.select("check-failed"):  # removed on all ranks at once: equal collectives and state
            self.monitors.pop(str(failure.details.get("monitor")), None)
        steps = [int(verdict.details["step"]) for verdict in agreed.verdicts if "step" in verdict.details]
        now = max(steps, default=0) if record is None else record.step
        return playbooks.respond(self.config.playbooks, self.config.budget, agreed, now)

    def _ask_all(self, ask: Callable[[Monitor], Iterable[Verdict]]) -> list[Verdict]:
        """Return the verdicts of all monitors. A monitor that raises returns no verdicts and is not called again."""
        verdicts: list[Verdict] = []
        for name, monitor in self.monitors.items():
            if name in self.silent:
                continue
            try:
                with run_within(name):
                    verdicts += list(ask(monitor))
            except Exception as error:
                self.silent.add(name)
                self.failed[name] = f"{type(error).__name__}: {error}"
        return verdicts

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        states = {name: monitor.state() for name, monitor in self.monitors.items()}
        return {name: state for name, state in states.items() if state}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, monitor in self.monitors.items():
            monitor.load_state(state.get(name, {}))
