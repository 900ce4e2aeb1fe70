"""Command `gangline plan table`: days, money and energy by model size and cluster size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gangline_basics.cluster.file import Cluster
from gangline_planner.assumed import complete_words
from gangline_planner.choose import NEAR, find_fastest
from gangline_planner.forecast import Forecast
from gangline_planner.page import format_number

MODELS = {  # model name in the table -> overrides
    "8B": "model=llama3-8b",
    "70B": "model=llama3-70b",
    "405B": "model=llama3-405b",
    "1T": "model=llama3-405b model.dim=24576 model.heads=192 model.ffn_dim=65536 model.layers=164",
}
# Batch of Llama 3 405B, 16.8 M tokens per step (arXiv 2407.21783, table 4): for all rows, up to the largest cluster.
BATCH = "batch.sequence_length=8192 batch.global_size=2048"
WORLDS = (8, 64, 512, 4096, 32768)  # numbers of accelerators
TOKENS = 20  # training tokens per parameter (Hoffmann et al., arXiv 2203.15556, table 3)
HEAD = "| model | accelerators | tokens | layout | MFU | days | accelerator-hours | money | MWh | electricity |"


@dataclass(frozen=True)
class TableRow:
    """Row of the table: a model on `world` accelerators. plan: plan of its fastest layout; None if no layout fits."""

    model: str
    world: int
    plan: Forecast | None

    @property
    def text(self) -> str:
        """Row as Markdown."""
        plan = self.plan
        if plan is None:
            return f"| {self.model} | {self.world:,} | | no layout fits | | | | | | |"
        if plan.days is None or plan.tokens is None:
            return f"| {self.model} | {self.world:,} | | failures leave no time to train | | | | | | |"
        axes = " x ".join(f"{axis} {size}" for axis, size in plan.explained.mesh.sizes if size > 1)
        money = "price unknown" if plan.dollars is None else f"${format_number(plan.dollars)}"
        energy = "" if plan.megawatt_hours is None else f"{format_number(plan.megawatt_hours)}"
        power = "" if plan.electricity_dollars is None else f"${format_number(plan.electricity_dollars)}"
        hours = format_number(plan.days * 24 * self.world)
        tokens = format_number(plan.tokens)
        return (
            f"| {self.model} | {self.world:,} | {tokens} | {axes} | {plan.mfu:.0%} | {plan.days:.3g} "
            f"| {hours} | {money} | {energy} | {power} |"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "world": self.world, **(self.plan.to_dict() if self.plan else {"fits": False})}


def plan_row(model: str, world: int, cluster: Cluster) -> TableRow:
    """Return the row of a model and a number of accelerators, with the fastest layout that fits."""
    case = complete_words(["parallel=3d", *MODELS[model].split(), *BATCH.split(), f"launch.processes={world}"])
    # the search tries this microbatch size first
    case = replace(case, run=replace(case.run, batch=replace(case.run.batch, micro_size=1)))
    plan, _ = find_fastest(case, cluster, within=NEAR)
    return TableRow(model, world, plan and plan.plan_tokens(TOKENS * plan.explained.parameters))


def iterate_rows(cluster: Cluster) -> Iterator[TableRow]:
    for model in MODELS:
        for world in WORLDS:
            yield plan_row(model, world, cluster)


def list_assumptions(cluster: Cluster) -> list[str]:
    """Return the assumptions of the table and the sources of its prices, as sentences."""
    assumptions = [
        f"On {cluster.name} ({cluster.about}); {TOKENS} tokens per parameter (arXiv 2203.15556), 2,048 sequences of "
        f"8,192 tokens per step, in bf16. No other layout that fits is faster by more than {NEAR:.0%}. Failures are "
        "included. Time, money and energy are proportional to the tokens."
    ]
    for name, what in (("price.hour", "one accelerator for one hour"), ("price.kwh", "one kWh")):
        price = cluster.numbers.get(name)
        assumptions.append(f"Price of {what}: " + (f"${price.value:g}, {price.source}." if price else "unknown."))
    return assumptions


def format_table(found: Iterator[TableRow], cluster: Cluster) -> str:
    """Return the table as Markdown, with its assumptions below."""
    line = "|" + " --- |" * (HEAD.count("|") - 1)
    return "\n".join([HEAD, line, *(row.text for row in found), "", "\n\n".join(list_assumptions(cluster))])
