"""From verdicts to an order, within budgets that only progress renews: pure functions. Torch-free.

A budget is counted from the lines of attempts.jsonl, which neither a rollback nor a restart undoes. A run makes
progress where it comes further than it ever was when something was ordered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gangline.health import Action, Agreed, Order, Verdict
from gangline_health.config import Playbook, Playbooks

if TYPE_CHECKING:
    from gangline.tools import Attempt


def used(lines: Iterable[Attempt], progress: int, now: int) -> int:
    """How many of these orders, oldest first, the run has had without `progress` steps of progress up to step `now`."""
    count, furthest = 0, None
    for line in lines:
        if furthest is not None and line.step - furthest >= progress:
            count = 0
        count, furthest = count + 1, line.step if furthest is None else max(furthest, line.step)
    return 0 if furthest is not None and now - furthest >= progress else count


def respond(playbooks: Playbooks, agreed: Agreed, now: int) -> Order | None:
    """The strongest of what the playbooks say; it answers every kind that one of them had a word for."""
    orders = [
        order
        for kind in dict.fromkeys(verdict.kind for verdict in agreed.verdicts)
        if (playbook := playbooks.of(kind)) and (order := answer(kind, playbook, agreed, now)) is not None
    ]
    if not orders:
        return None
    strongest = max(orders, key=lambda order: order.action)
    kinds = tuple(dict.fromkeys(kind for order in (strongest, *orders) for kind in order.kinds))
    return Order(
        strongest.action,
        kinds,
        before_step=strongest.before_step,
        rate=strongest.rate,
        rate_steps=strongest.rate_steps,
        exclude=strongest.exclude,
    )


def answer(kind: str, playbook: Playbook, agreed: Agreed, now: int) -> Order | None:
    """What one playbook says about its kind; None while it is patient: the verdict's own suggestion counts then."""
    found = agreed.of(kind)
    if max(int(verdict.details.get("row", 1)) for verdict in found) < playbook.patience:
        return None
    before = [line for line in agreed.history if line.order and kind in line.kinds]
    action = playbook.actions[min(used(before, playbook.progress, now), len(playbook.actions) - 1)]
    return order(kind, action, playbook, found, now)


def order(kind: str, action: str, playbook: Playbook, found: Sequence[Verdict], now: int) -> Order:
    """An action's word as an order."""
    kinds, rate, rate_steps = (kind,), playbook.rate, playbook.rate_steps
    if action == "lower_rate":  # a step that a verdict would leave out is left out
        suggested = max(Action.WARN, *(verdict.suggestion for verdict in found))
        return Order(suggested, kinds, rate=rate, rate_steps=rate_steps)
    if action == "roll_back":
        first = min(int(verdict.details.get("first", now)) for verdict in found)
        before = max(1, first - playbook.back)
        return Order(Action.ROLL_BACK, kinds, before_step=before, rate=rate, rate_steps=rate_steps)
    if action == "restart":
        return Order(Action.RESTART, kinds, rate=rate, rate_steps=rate_steps)
    if action == "exclude":
        hosts = tuple(dict.fromkeys(str(v.details["host"]) for v in found if v.details.get("host")))
        return Order(Action.RESTART if hosts else Action.WARN, kinds, exclude=hosts)
    return Order(Action[action.upper()], kinds)
