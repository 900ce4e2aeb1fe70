"""Command `gangline plan compare`: compares the plan of a run with its measurements, term by term."""

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
from gangline_planner.page import format_unknown_costs

WARM = 2  # number of first steps to ignore: warm-up of allocators, compilers and caches
WAITS = ("tp", "cp", "fold", "dp", "pp", "bubble", "jitter")


@dataclass(frozen=True)
class Term:
    """Part of the step time, in seconds, or memory of a rank, in bytes: planned and measured."""

    name: str
    planned: float
    measured: float

    @property
    def apart(self) -> float:
        return self.planned - self.measured


@dataclass(frozen=True)
class Comparison:
    """Plan of a run and its measurements. terms: some parts of the step time; memory: None if it was not recorded."""

    plan: Forecast
    steps: int
    step: Term
    terms: tuple[Term, ...]
    memory: Term | None

    @property
    def worst(self) -> Term | None:
        """Term with the largest difference between plan and measurement; None without terms."""
        return max(self.terms, key=lambda term: abs(term.apart), default=None)

    def to_dict(self) -> dict[str, Any]:
        terms = [self.step, *self.terms, *([self.memory] if self.memory else [])]
        return {
            "steps": self.steps,
            "seconds": self.plan.step.kinds,
            "terms": {term.name: {"planned": term.planned, "measured": term.measured} for term in terms},
            "worst": self.worst.name if self.worst else None,
        }


def compare(path: str, cluster: Cluster) -> Comparison:
    """Return the comparison of a run's plan with its measurements. path: run directory.

    The first `WARM` steps and all steps that begin with a save are left out. Raises UserError if the path is not a run
    directory, or if no step remains.
    """
    directory = RunDirectory.open(path)
    report = make_notes("gangline plan compare")
    records = read_records(directory.metrics, report) if Path(directory.metrics).exists() else []
    whole = (
        one for one in records if isinstance(one.get("step_seconds"), float) and isinstance(one.get("seconds"), dict)
    )
    steps = [one for one in whole if one["step"] > WARM and not one.get("checkpoint")]
    if not steps:
        raise UserError(
            f"{path} has recorded no step that can be compared with a plan.",
            f"Of {len(records)} steps, the first {WARM} and all steps that begin with a save are excluded.",
            f"To train more steps:  train resume={path} run.steps=...",
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
        terms=tuple(_list_terms(plan.step.kinds, steps)),
        memory=Term("memory", float(plan.memory), memory) if memory else None,
    )


def _list_terms(kinds: Mapping[str, float], steps: Sequence[dict[str, Any]]) -> list[Term]:
    """Return the terms of the step time from phase times averaged over all ranks, with waits as a separate term.

    If only the phase times of rank 0 are recorded, they are used, and waits are part of `forward_backward`.
    """
    waits = sum(kinds[kind] for kind in WAITS)
    passes = kinds["compute"] + kinds["recompute"]
    parted = [one["rank_phases"] for one in steps if one.get("rank_phases")]
    plan_seconds = {"optimizer": kinds["optimizer"], "data": kinds["data"]}
    if parted:
        names = {name for one in parted for name in one}
        medians = {name: median(mean(one.get(name) or [0.0]) for one in parted) for name in names}
        medians["forward_backward"] = medians.pop("forward", 0.0) + medians.pop("backward", 0.0)
        plan_seconds = {"forward_backward": passes, "collective": waits, **plan_seconds, "other": kinds["host"]}
    else:
        medians = {name: median(one["seconds"].get(name, 0.0) for one in steps) for name in steps[-1]["seconds"]}
        plan_seconds = {"forward_backward": passes + waits, **plan_seconds}
    return [Term(name, planned, medians[name]) for name, planned in plan_seconds.items() if name in medians]


def format_comparison(found: Comparison) -> str:
    """Return the comparison as a text report."""
    lines = [
        f"{found.steps} measured steps of {found.plan.world} ranks, compared with a plan for {found.plan.cluster.name}"
    ]
    lines += format_unknown_costs(found.plan)
    lines.append(f"  {'':18} {'planned':>11} {'measured':>11}")
    lines += [
        f"  {term.name:18} {term.planned:9.4f} s {term.measured:9.4f} s  {_format_ratio(term)}"
        for term in (found.step, *found.terms)
    ]
    kinds = found.plan.step.kinds
    if waits := ", ".join(f"{kind} {kinds[kind]:.4g} s" for kind in WAITS if kinds[kind] > 1e-9):
        lines.append(f"  planned waits: {waits}")
    if found.memory:
        term = found.memory
        lines.append(
            f"  {'memory':18} {term.planned / 1e9:8.3f} GB {term.measured / 1e9:8.3f} GB  {_format_ratio(term)}"
        )
    if found.worst:
        lines.append(f"largest difference: {found.worst.name}, planned minus measured {found.worst.apart:+.4g} s")
    return "\n".join(lines)


def _format_ratio(term: Term) -> str:
    return f"{term.planned / term.measured - 1:+.1%}" if term.measured else ""
