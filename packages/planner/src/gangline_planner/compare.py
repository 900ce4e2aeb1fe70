"""`gangline plan compare`: a plan beside what the run measured, term by term, and where they part most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from gangline import UserError
from gangline.cli import make_notes
from gangline.model.compose import compose_model
from gangline.record import read_records
from gangline.run.directory import RunDirectory
from gangline_basics.cluster.file import Cluster
from gangline_planner.assumed import Planned, explain
from gangline_planner.forecast import Forecast, forecast
from gangline_planner.page import unknown

WARM = 2  # steps at the beginning of a run that are slower than all others: allocators, compilers, caches
WAITS = ("tp", "cp", "fold", "dp", "pp", "bubble", "jitter")


@dataclass(frozen=True)
class Term:
    """Seconds of a step (or bytes of a rank) as planned and as measured."""

    name: str
    planned: float
    measured: float

    @property
    def apart(self) -> float:
        return self.planned - self.measured


@dataclass(frozen=True)
class Comparison:
    """terms: of a step's time; they are not all of it. memory: bytes; None where the run did not say."""

    plan: Forecast
    steps: int
    step: Term
    terms: tuple[Term, ...]
    memory: Term | None

    @property
    def worst(self) -> Term | None:
        """The term that makes most of the difference."""
        return max(self.terms, key=lambda term: abs(term.apart), default=None)

    def data(self) -> dict[str, Any]:
        terms = [self.step, *self.terms, *([self.memory] if self.memory else [])]
        return {
            "steps": self.steps,
            "seconds": self.plan.step.kinds,
            "terms": {term.name: {"planned": term.planned, "measured": term.measured} for term in terms},
            "worst": self.worst.name if self.worst else None,
        }


def compare(path: str, cluster: Cluster) -> Comparison:
    """Raises UserError for what is no run directory, and for a run that has no steps behind its first ones."""
    directory = RunDirectory.open(path)
    told = make_notes("gangline plan compare")
    records = read_records(directory.metrics, told) if Path(directory.metrics).exists() else []
    whole = (
        one for one in records if isinstance(one.get("step_seconds"), float) and isinstance(one.get("seconds"), dict)
    )
    steps = [one for one in whole if one["step"] > WARM and not one.get("checkpoint")]
    if not steps:
        raise UserError(
            f"{path} has no step to compare a plan with.",
            f"Of its {len(records)} steps count those behind the first {WARM} that do not begin with a save.",
            f"Let it train on:  train resume={path} run.steps=...",
        )
    run = directory.run()
    phases = steps[-1].get("rank_phases") or {}
    ranks = len(next(iter(phases.values()), [])) or None
    if ranks and getattr(run.launch, "processes", ranks) is None:
        run = replace(run, launch=replace(run.launch, processes=ranks))
    case = Planned(run, (), (), compose_model(run))
    plan = forecast(explain(case, run, cluster), cluster)
    memory = max((float(one.get("memory_bytes") or 0) for one in steps), default=0.0)
    return Comparison(
        plan=plan,
        steps=len(steps),
        step=Term("step", plan.step.seconds, median(one["step_seconds"] for one in steps)),
        terms=tuple(_terms(plan.step.kinds, steps)),
        memory=Term("memory", float(plan.memory), memory) if memory else None,
    )


def _terms(kinds: Mapping[str, float], steps: Sequence[dict[str, Any]]) -> list[Term]:
    """By the phases of the ranks where the run has them, waits for other ranks apart; else by those of rank 0."""
    waits = sum(kinds[kind] for kind in WAITS)
    passes = kinds["compute"] + kinds["recompute"]
    parted = [one["rank_phases"] for one in steps if one.get("rank_phases")]
    named = {"optimizer": kinds["optimizer"], "data": kinds["data"]}
    if parted:
        names = {name for one in parted for name in one}
        found = {name: median(mean(one.get(name) or [0.0]) for one in parted) for name in names}
        found["forward_backward"] = found.pop("forward", 0.0) + found.pop("backward", 0.0)
        named = {"forward_backward": passes, "collective": waits, **named, "other": kinds["host"]}
    else:
        found = {name: median(one["seconds"].get(name, 0.0) for one in steps) for name in steps[-1]["seconds"]}
        named = {"forward_backward": passes + waits, **named}
    return [Term(name, planned, found[name]) for name, planned in named.items() if name in found]


def text(found: Comparison) -> str:
    """The whole page."""
    lines = [f"{found.steps} steps of {found.plan.world} ranks beside a plan for {found.plan.cluster.name}"]
    lines += unknown(found.plan)
    lines.append(f"  {'':18} {'planned':>11} {'measured':>11}")
    lines += [
        f"  {term.name:18} {term.planned:9.4f} s {term.measured:9.4f} s  {_ratio(term)}"
        for term in (found.step, *found.terms)
    ]
    kinds = found.plan.step.kinds
    if waits := ", ".join(f"{kind} {kinds[kind]:.4g} s" for kind in WAITS if kinds[kind] > 1e-9):
        lines.append(f"  of what is planned, waits: {waits}")
    if found.memory:
        term = found.memory
        lines.append(f"  {'memory':18} {term.planned / 1e9:8.3f} GB {term.measured / 1e9:8.3f} GB  {_ratio(term)}")
    if found.worst:
        lines.append(f"they part most in {found.worst.name}: {found.worst.apart:+.4g} s planned over measured")
    return "\n".join(lines)


def _ratio(term: Term) -> str:
    return f"{term.planned / term.measured - 1:+.1%}" if term.measured else ""
