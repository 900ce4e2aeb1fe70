"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gangline_planner.forecast import Forecast

GB = 1e9


def text(plan: Forecast, words: Sequence[str], assumed: Sequence[str]) -> str:
    """The whole page."""
    return "\n".join([*_head(plan, words, assumed), "", *_step(plan), "", *_memory(plan), "", *_all(plan)])


def _head(plan: Forecast, words: Sequence[str], assumed: Sequence[str]) -> Iterable[str]:
    found = plan.explained
    axes = " x ".join(f"{axis} {size}" for axis, size in found.mesh.sizes if size > 1) or "one rank"
    yield f"{plan.world} ranks of {plan.cluster.name} ({plan.cluster.about})"
    yield f"{number(found.parameters)} parameters; {axes}; {found.microbatches} microbatches, schedule {found.schedule}"
    if assumed:
        yield f"assumed: {' '.join(assumed)}"
    guesses = [name for name, quantity in plan.cluster.numbers.items() if quantity.source.startswith("assumed")]
    if guesses:
        yield f"the cluster file has assumed, not measured: {', '.join(guesses)}"
    if found.unknown:
        least = f"the step takes at least {plan.step.unknown:.3g} s more"
        yield f"no cost is known of {', '.join(found.unknown[:3])}: {least}"


def _step(plan: Forecast) -> Iterable[str]:
    yield f"a step of {number(plan.explained.tokens)} tokens: {plan.step.seconds:.4g} s"
    for kind, seconds in plan.step.kinds.items():
        share = seconds / plan.step.seconds
        if seconds > 1e-9:
            yield f"  {kind:16} {seconds:9.4f} s  {share:6.1%}  {'#' * round(40 * share)}"
    each = plan.tokens_per_second / plan.world
    yield f"{number(plan.tokens_per_second)} tokens/s, {each:.4g} a rank; MFU {plan.mfu:.1%} of the 16-bit peak"


def _memory(plan: Forecast) -> Iterable[str]:
    found, limit = plan.explained, plan.cluster["memory.bytes"]
    rank = found.ranks[found.fullest]
    yield "memory of the fullest rank" + f", of pipeline rank {found.fullest}" * (len(found.ranks) > 1)
    for kind, size in rank.bytes.items():
        if size:
            yield f"  {kind:16} {size / GB:9.3f} GB"
    room = (limit - plan.memory) / GB
    fits = f"{room:.3g} GB to spare" if plan.fits else f"DOES NOT FIT: {-room:.3g} GB too much"
    yield f"  {'together':16} {plan.memory / GB:9.3f} GB of {limit / GB:g}: {fits}"


def _all(plan: Forecast) -> Iterable[str]:
    if plan.losses is not None:
        lost = plan.losses
        yield (
            f"a failure every {plan.cluster['failure.hours'] / plan.world:.3g} h: save every {lost.interval:.3g} s "
            f"(Young), goodput {lost.progress:.1%} (saving {lost.stall:.2%}, work done twice {lost.redone:.2%}, "
            f"coming back {lost.restart:.2%})"
        )
    if plan.tokens is None or plan.days is None:
        yield "--tokens N says how many days, and what they cost"
        return
    yield f"{number(plan.tokens)} tokens: {plan.days:.4g} days, {number(plan.days * 24 * plan.world)} accelerator-hours"
    if plan.megawatt_hours is not None:
        yield f"  {plan.megawatt_hours:.4g} MWh at the accelerator's full power and its share of the node"
    if plan.dollars is None:
        yield f"  no sum of money: {plan.cluster.name} names no price (price.hour); none is invented"
    else:
        price = plan.cluster.numbers["price.hour"]
        yield f"  {plan.dollars:,.0f} US dollars at {price.value:g} an hour ({price.source})"


def number(value: float) -> str:
    """Three digits and a unit."""
    for size, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g}"
