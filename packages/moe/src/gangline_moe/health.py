"""Health check `experts`: finds experts without tokens, or with an excessive load. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gangline.health import Action, HealthCheck, Verdict
from gangline_moe.config import ExpertsHealth
from gangline_moe.load_history import get_loads

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.record import StepRecord


class ExpertsCheck(HealthCheck):
    """Health check that counts consecutive steps in which an expert is dead or hot, and warns once at `patience`."""

    def __init__(self, config: ExpertsHealth, run: Run) -> None:
        self.patience, self.hot = config.patience, config.hot
        self.counts: dict[str, int] = {}  # "dead blocks.3 7" (kind, layer, expert) -> number of consecutive steps

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        now: dict[str, int] = {}
        for layer, load in get_loads(record.metrics).items():
            mean = sum(load) / len(load)
            for expert, count in enumerate(load):
                kind = "dead" if count == 0 else "hot" if count > self.hot * mean else ""
                if not kind:
                    continue
                key = f"{kind} {layer} {expert}"
                now[key] = self.counts.get(key, 0) + 1
                if now[key] == self.patience:
                    yield self._make_verdict(kind, layer, expert, count / mean)
        self.counts = now

    def _make_verdict(self, kind: str, layer: str, expert: int, load: float) -> Verdict:
        of_last = "no token" if kind == "dead" else f"{load:.1f} times the mean load"
        evidence = f"{of_last} for {self.patience} consecutive steps"
        return Verdict(f"{kind}-expert", f"{layer}, expert {expert}", 1.0, evidence, Action.WARN)

    def state(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state(self, state: dict[str, Any]) -> None:
        self.counts = dict(state.get("counts", {}))
