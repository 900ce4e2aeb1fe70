"""Playbooks: pure functions from verdicts to one response, within a budget that only progress renews. Torch-free.

The used budget is counted from the lines of attempts.jsonl, which no rollback or restart removes. A run makes progress
when it trains past the furthest step with a response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gangline.checkpoint.id import CheckpointId
from gangline.health import Action, Agreed, Response, Verdict
from gangline_health.config import Budget, Playbook, Playbooks

if TYPE_CHECKING:
    from gangline.run.attempts import Attempt


RETURNS = ("roll_back", "restart")


def count_used(lines: Iterable[Attempt], progress: int, now: int) -> int:
    """Return the number of responses, up to step `now`, since the run last made `progress` steps of progress.

    lines: lines of attempts.jsonl with an action, oldest first.
    """
    count, furthest = 0, None
    for line in lines:
        if furthest is not None and line.step - furthest >= progress:
            count = 0
        count, furthest = count + 1, line.step if furthest is None else max(furthest, line.step)
    return 0 if furthest is not None and now - furthest >= progress else count


def respond(playbooks: Playbooks, budget: Budget, agreed: Agreed, now: int) -> Response | None:
    """Return the joined response of all playbooks to the agreed verdicts; None if no playbook answers.

    A rollback or restart beyond the budget becomes STOP.

    now  step that is judged, or that is about to begin
    """
    responses = [
        response
        for kind in dict.fromkeys(verdict.kind for verdict in agreed.verdicts)
        if (playbook := playbooks.get_playbook(kind))
        and (response := answer(kind, playbook, budget, agreed, now)) is not None
    ]
    if not responses:
        return None
    strongest = join_responses(responses)
    kinds = strongest.kinds
    turns = [line for line in agreed.history if line.action in RETURNS]
    count = count_used(turns, budget.progress, now)
    if strongest.action in (Action.ROLL_BACK, Action.RESTART) and count >= budget.responses:
        why = (
            f"the budget is used up: {count} rollbacks and restarts without {budget.progress} steps of progress "
            "(health.monitors.budget)"
        )
        return Response(Action.STOP, kinds, why=why)
    return strongest


def join_responses(responses: Sequence[Response]) -> Response:
    """Return the strongest response, with the earliest checkpoint, lowest rate and all exclusions of all responses.

    If any response skips all samples read since the checkpoint, the result does too: they may contain a bad batch.
    """
    strongest = max(responses, key=lambda response: response.action)
    kinds = tuple(dict.fromkeys(kind for response in (strongest, *responses) for kind in response.kinds))
    strongest = replace(strongest, kinds=kinds, exclude=tuple(dict.fromkeys(n for r in responses for n in r.exclude)))
    if cuts := [response for response in responses if response.cuts]:
        lowest = min(cuts, key=lambda response: response.rate)
        strongest = replace(strongest, rate=lowest.rate, rate_steps=lowest.rate_steps)
    if strongest.action not in (Action.ROLL_BACK, Action.RESTART):
        return strongest
    returns = [response for response in responses if response.before_step is not None]
    if not returns:
        return strongest
    before = min(response.before_step for response in returns if response.before_step is not None)
    later = [response.else_before for response in returns if response.else_before is not None]
    skip = None if any(response.skip is None for response in returns) else strongest.skip
    return replace(strongest, before_step=before, else_before=min(later, default=None), skip=skip)


def answer(kind: str, playbook: Playbook, budget: Budget, agreed: Agreed, now: int) -> Response | None:
    """Return the response of one playbook; None within its patience: then the verdict's suggested action counts."""
    verdicts = agreed.select(kind)
    if max(int(verdict.details.get("row", 1)) for verdict in verdicts) < playbook.patience:
        return None
    lines = [line for line in agreed.history if line.action and kind in line.kinds]
    before = count_used(lines, budget.progress, now)
    action = choose_action(playbook.actions[min(before, len(playbook.actions) - 1) :], verdicts)
    why = f"response {before + 1} to {kind} without {budget.progress} steps of progress" if before else ""
    does = replace(make_response(kind, action, playbook, verdicts, now), why=why)
    if does.before_step is None or any(verdict.details.get("proven") for verdict in verdicts):
        return does
    returns = [line for line in lines[len(lines) - before :] if line.action in RETURNS]
    starts = [id.step for line in returns if (id := CheckpointId.parse(line.start or "")) is not None]
    return replace(does, before_step=max(1, min([does.before_step, *starts])))  # older than every checkpoint tried


def choose_action(actions: Sequence[str], found: Sequence[Verdict]) -> str:
    """Return the first action that is possible; `exclude` needs a verdict with a certain cause (detail `exclude`).

    If no action is possible, returns a rollback, or a stop if no verdict has the first bad step (detail `first`).
    """
    for action in actions:
        if action != "exclude" or name_causes(found):
            return action
    return "roll_back" if any("first" in verdict.details for verdict in found) else "stop"


def name_causes(found: Sequence[Verdict]) -> tuple[str, ...]:
    """Return the nodes that verdicts name as certain cause, by name or by one of their ranks ("rank 3")."""
    return tuple(dict.fromkeys(str(v.details["exclude"]) for v in found if v.details.get("exclude")))


def make_response(kind: str, action: str, playbook: Playbook, found: Sequence[Verdict], now: int) -> Response:
    """Return the response with this action. A rollback or restart uses a checkpoint before the first bad step."""
    kinds, rate, rate_steps = (kind,), playbook.rate, playbook.rate_steps
    if action == "lower_rate":  # the step is skipped too if a verdict suggests that
        suggested = max(Action.WARN, *(verdict.suggestion for verdict in found))
        return Response(suggested, kinds, rate=rate, rate_steps=rate_steps)
    if action not in ("roll_back", "restart", "exclude"):
        return Response(Action[action.upper()], kinds)
    does = Response(
        Action.ROLL_BACK if action == "roll_back" else Action.RESTART,
        kinds,
        skip=None if playbook.skip else 0,
        rate=1.0 if action == "exclude" else rate,
        rate_steps=0 if action == "exclude" else rate_steps,
        exclude=name_causes(found) if action == "exclude" else (),
    )
    steps = [int(verdict.details["first"]) for verdict in found if "first" in verdict.details]
    if not steps and action != "roll_back":  # no state is damaged, such as by a slow machine: any checkpoint is good
        return does
    first = max(1, min(steps, default=now))
    return replace(does, before_step=max(1, first - playbook.back), else_before=first)
