"""Text report of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gangline.config import Run
from gangline.plugin.registry import installed
from gangline_basics.cluster.file import list_shipped
from gangline_planner.accuracy import describe_expected_error
from gangline_planner.forecast import Forecast
from gangline_planner.pictures.terminal import draw_memory_bars, draw_step_bar, draw_timeline

GB = 1e9
NAMED = 3  # maximum number of model nodes without a known cost to list in a line
FAILURES = ("failure.hours", "storage.bandwidth", "restart.seconds")


def format_plan(plan: Forecast, run: Run, assumed: Sequence[str]) -> str:
    """Return the text report of a plan. assumed: overrides that were added to the overrides of the user."""
    return "\n".join(
        [
            *_format_head(plan, run, assumed),
            "",
            *_format_step(plan),
            "",
            *_format_memory(plan),
            "",
            *_format_pipeline(plan),
            *_format_totals(plan),
        ]
    )


def format_budget(plan: Forecast, budget: float) -> str:
    """Return a line on the tokens that `budget` dollars buy; `plan` is the plan for these tokens."""
    days = "never: failures leave no time to train" if plan.days is None else f"{plan.days:.4g} days"
    return f"{budget:,.0f} US dollars buy {format_number(plan.tokens or 0.0)} tokens, {days}"


def _format_head(plan: Forecast, run: Run, assumed: Sequence[str]) -> Iterable[str]:
    explanation = plan.explained
    axes = " x ".join(f"{axis} {size}" for axis, size in explanation.mesh.sizes if size > 1) or "one rank"
    yield f"{plan.world} ranks of {plan.cluster.name} ({plan.cluster.about})"
    parameters = format_number(explanation.parameters)
    yield f"{parameters} parameters; {axes}; {explanation.microbatches} microbatches, schedule {explanation.schedule}"
    precision = installed().find_part(run.precision).part.name
    yield f"{run.batch.global_size:,} sequences of {run.batch.sequence_length:,} tokens a step, in {precision}"
    if assumed:
        yield f"assumed: {' '.join(assumed)}"
    guesses = [name for name, quantity in plan.cluster.numbers.items() if quantity.source.startswith("assumed")]
    racks = any(transfer.tier == "rack" for rank in explanation.ranks for transfer in rank.transfers)
    if racks and plan.cluster.get("link.rack.bandwidth") is None:
        guesses.append("link.rack (equal to link.cluster)")
    if guesses:
        yield f"numbers of the cluster file that are assumed, not measured: {', '.join(guesses)}"
    yield from format_unknown_costs(plan)


def format_unknown_costs(plan: Forecast) -> Iterable[str]:
    """Yield a line if the cost of some nodes of the model is unknown."""
    if names := plan.explained.unknown:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        missing = "their parameters and operations are unknown and not included in this report"
        least = f"at least {plan.step.unknown:.3g} s must be added to the step time"
        yield f"unknown cost of {', '.join(names[:NAMED])}{more}: {least if plan.step.unknown else missing}"


def _format_step(plan: Forecast) -> Iterable[str]:
    yield f"a step of {format_number(plan.explained.tokens)} tokens: {plan.step.seconds:.4g} s"
    yield from draw_step_bar(plan.step.kinds)
    for kind, seconds in plan.step.kinds.items():
        share = seconds / plan.step.seconds
        if seconds > 1e-9 or kind == "data":
            yield f"  {kind:16} {seconds:9.4f} s  {share:6.1%}"
    if plan.save_stall is not None:
        yield f"  {'checkpoint stall':16} {plan.save_stall:9.4f} s  on average, not included in the step time"
    each = plan.tokens_per_second / plan.world
    yield f"{format_number(plan.tokens_per_second)} tokens/s, {each:.4g} per rank; MFU {plan.mfu:.1%} (16-bit peak)"
    if plan.cluster.name in list_shipped():
        yield describe_expected_error()


def _format_memory(plan: Forecast) -> Iterable[str]:
    explanation, limit = plan.explained, plan.cluster["memory.bytes"]
    rank = explanation.ranks[explanation.fullest]
    yield "memory of the fullest rank" + f", pipeline rank {explanation.fullest}" * (len(explanation.ranks) > 1)
    for kind, size in rank.bytes.items():
        if size:
            yield f"  {kind:16} {size / GB:9.3f} GB"
    room = (limit - plan.memory) / GB
    fits = f"{room:.3g} GB free" if plan.fits else f"DOES NOT FIT: {-room:.3g} GB over the limit"
    yield f"  {'total':16} {plan.memory / GB:9.3f} GB of {limit / GB:g}: {fits}"
    if len(explanation.ranks) > 1:
        yield "memory by pipeline rank"
        yield from draw_memory_bars([one.bytes for one in explanation.ranks], limit)


def _format_pipeline(plan: Forecast) -> Iterable[str]:
    if len(plan.explained.ranks) > 1:
        yield f"timeline of the pipeline, schedule {plan.explained.schedule}"
        yield from draw_timeline(plan.step.timeline)
        yield ""


def _format_totals(plan: Forecast) -> Iterable[str]:
    if not plan.fits:
        yield (
            "the layout does not fit into memory, so goodput, days, money and tokens are not computed: use more "
            "accelerators or shorter sequences, or leave more layout options unset"
        )
        return
    yield from _format_failures(plan)
    if plan.tokens is None:
        yield "--tokens N adds days and cost; --budget DOLLARS adds the number of tokens that the money buys"
        return
    if plan.days is None:
        yield f"{format_number(plan.tokens)} tokens: never, because failures leave no time to train"
        return
    hours = format_number(plan.days * 24 * plan.world)
    yield f"{format_number(plan.tokens)} tokens: {plan.days:.4g} days, {hours} accelerator-hours"
    numbers = plan.cluster.numbers
    if plan.dollars is None:
        yield f"  price unknown: price.hour is missing in {plan.cluster.name}; set --price DOLLARS"
    else:
        price = numbers["price.hour"]
        yield f"  {plan.dollars:,.0f} US dollars at {price.value:g} per accelerator and hour ({price.source})"
    if plan.megawatt_hours is not None:
        yield f"  {plan.megawatt_hours:.4g} MWh at the accelerator's full power and its share of the node"
    if plan.electricity_dollars is not None:
        price = numbers["price.kwh"]
        yield f"  {plan.electricity_dollars:,.0f} US dollars of electricity at {price.value:g} per kWh ({price.source})"


def _format_failures(plan: Forecast) -> Iterable[str]:
    failure = plan.reliability
    if failure is None or plan.save_every is None or plan.goodput is None:
        lacks = [name for name in FAILURES if plan.cluster.get(name) is None]
        yield f"goodput unknown: {', '.join(lacks)} missing in {plan.cluster.name}; --mtbf HOURS sets failure.hours"
        return
    yield (
        f"a failure every {failure.mtbf_seconds / 3600:.3g} h, {failure.recovery_seconds:g} s to recover: save every "
        f"{plan.save_every:.3g} s (Young and Daly), goodput {plan.goodput:.1%}"
    )


def format_number(value: float) -> str:
    """Return a number as text with three significant digits and an SI prefix (k, M, G, T, P)."""
    for size, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g}"
