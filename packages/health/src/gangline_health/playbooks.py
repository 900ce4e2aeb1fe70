"""From verdicts to an order, within budgets that only progress renews: pure functions. Torch-free.

A budget is counted from the lines of attempts.jsonl, which neither a rollback nor a restart undoes. A run makes
progress where it comes further than it ever was when something was ordered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gangline.health import Action, Agreed, Order, Verdict
from gangline_health.config import Budget, Playbook, Playbooks

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


def respond(playbooks: Playbooks, budget: Budget, agreed: Agreed, now: int) -> Order | None:
    """The strongest of what the playbooks say; it answers every kind that one of them had a word for.

    now: the step that is judged, or about to come.
    """
    orders = [
        order
        for kind in dict.fromkeys(verdict.kind for verdict in agreed.verdicts)
        if (playbook := playbooks.of(kind)) and (order := answer(kind, playbook, budget, agreed, now)) is not None
    ]
    if not orders:
        return None
    strongest = max(orders, key=lambda order: order.action)
    kinds = tuple(dict.fromkeys(kind for order in (strongest, *orders) for kind in order.kinds))
    turns = [line for line in agreed.history if line.order in ("roll_back", "restart")]
    spent = used(turns, budget.progress, now)
    if strongest.action in (Action.ROLL_BACK, Action.RESTART) and spent >= budget.orders:
        why = f"the budget is spent: {spent} returns and restarts without {budget.progress} steps of progress"
        return Order(Action.STOP, kinds, why=why)
    return replace(strongest, kinds=kinds)


def answer(kind: str, playbook: Playbook, budget: Budget, agreed: Agreed, now: int) -> Order | None:
    """What one playbook says about its kind; None while it is patient: the verdict's own suggestion counts then."""
    found = agreed.of(kind)
    if max(int(verdict.details.get("row", 1)) for verdict in found) < playbook.patience:
        return None
    before = used([line for line in agreed.history if line.order and kind in line.kinds], budget.progress, now)
    action = playbook.actions[min(before, len(playbook.actions) - 1)]
    why = f"answer {before + 1} to {kind} without {budget.progress} steps of progress" if before else ""
    return replace(order(kind, action, playbook, found, now), why=why)


def order(kind: str, action: str, playbook: Playbook, found: Sequence[Verdict], now: int) -> Order:
    """An action's word as an order."""
    kinds, rate, rate_steps = (kind,), playbook.rate, playbook.rate_steps
    if action == "lower_rate":  # a step that a verdict would leave out is left out
        suggested = max(Action.WARN, *(verdict.suggestion for verdict in found))
        return Order(suggested, kinds, rate=rate, rate_steps=rate_steps)
    if action == "roll_back":
        first = max(1, min(int(verdict.details.get("first", now)) for verdict in found))
        return Order(
            Action.ROLL_BACK,
            kinds,
            before_step=max(1, first - playbook.back),
            else_before=first,
            skip=None if playbook.skip else 0,
            rate=rate,
            rate_steps=rate_steps,
        )
    if action == "restart":
        return Order(Action.RESTART, kinds, rate=rate, rate_steps=rate_steps)
    if action == "exclude":
        hosts = tuple(dict.fromkeys(str(v.details["host"]) for v in found if v.details.get("host")))
        return Order(Action.RESTART if hosts else Action.WARN, kinds, exclude=hosts)
    return Order(Action[action.upper()], kinds)
