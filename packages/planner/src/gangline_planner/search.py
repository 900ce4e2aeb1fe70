"""`gangline plan search`: the layouts that words leave open, the fastest first, and what those lack that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gangline.cluster import Cluster
from gangline_planner.assumed import Planned, explain, refused
from gangline_planner.choose import bounded
from gangline_planner.forecast import Forecast, forecast

SHOWN = 10


@dataclass(frozen=True)
class Candidate:
    """A layout, and the words that make it of the user's."""

    plan: Forecast
    words: tuple[str, ...]

    @property
    def lacks(self) -> float:
        """Bytes that it needs beyond what an accelerator has; 0 where it fits."""
        return max(0.0, self.plan.memory - self.plan.cluster["memory.bytes"])


def search(case: Planned, cluster: Cluster, shown: int = SHOWN) -> tuple[list[Candidate], list[Candidate]]:
    """(those that fit, fastest first; those that do not, the least too large first), `shown` of each at most.

    Alternatives come by the least time that they can take, so that none is looked at which cannot be among the first.
    Every one that fits has passed `check`.
    """
    fit: list[Candidate] = []
    large: list[Candidate] = []
    for bound, run, words in bounded(case, cluster):
        if len(fit) >= shown and bound >= fit[shown - 1].plan.step.seconds:
            break
        try:
            found = Candidate(forecast(explain(case, run, cluster), cluster), words)
        except ValueError:  # it does not divide
            continue
        if found.lacks:
            large.append(found)
        elif refused(run) is None:
            fit = sorted([*fit, found], key=lambda one: one.plan.step.seconds)
    return fit[:shown], sorted(large, key=lambda one: one.lacks)[:shown]


def text(fit: Sequence[Candidate], large: Sequence[Candidate], words: Sequence[str], assumed: Sequence[str]) -> str:
    """The whole page; each row a line that `train` takes."""
    lines = [f"assumed: {' '.join(assumed)}"] if assumed else []
    lines += [f"{'s a step':>9} {'MFU':>6} {'GB':>7}"] if fit else ["no layout fits"]
    for one in fit:
        typed = " ".join([*words, *assumed, *one.words])
        lines.append(f"{one.plan.step.seconds:9.4g} {one.plan.mfu:6.1%} {one.plan.memory / 1e9:7.1f}  train {typed}")
    if large:
        lines.append("too large by")
        lines += [f"{one.lacks / 1e9:8.1f} GB  {' '.join(one.words)}" for one in large]
    return "\n".join(lines)
