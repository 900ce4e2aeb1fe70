"""Responses to verdicts: carried out on all ranks at one step boundary, recorded if they change the course."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from gangline.health import Action, Agreed, Response
from gangline.run.attempts import Attempt, stamp
from gangline.train.restore import begin
from gangline.train.rollback import return_points, roll_back
from gangline.train.session import Session
from gangline.train.verdicts import STORE_LOST


@dataclass(frozen=True)
class Ending:
    """End of the training loop. why: "done", a signal's name, "stop", "restart" or "error"; evidence: details.

    requeue: whether repeating the same command fixes the problem.
    kinds: kinds of the verdicts that end the loop. first: first step whose state the verdicts distrust; None: unknown.
    """

    why: str
    evidence: str = ""
    requeue: bool = False
    kinds: tuple[str, ...] = ()
    first: int | None = None


def carry_out(s: Session, response: Response, agreed: Agreed) -> Ending | None:
    """Carry out the response; return how the run ends, or None if the run continues."""
    if response.action > Action.NOTE or response.changes_course:
        s.record_event("response", **{**asdict(response), "action": response.action.name.lower()})
    if not response.changes_course:
        return None
    texts = [str(verdict) for verdict in agreed.verdicts if verdict.kind in response.kinds]
    evidence = "; ".join([*texts, *filter(None, [response.why])])
    firsts = [v.details["first"] for v in agreed.verdicts if v.kind in response.kinds and "first" in v.details]
    stop = Ending("stop", evidence, kinds=response.kinds, first=min(firsts, default=None))
    line = Attempt(
        attempt=s.attempt,
        start=s.saved,
        why=evidence,
        time=stamp(agreed.now),
        action=response.action.name.lower(),
        kinds=response.kinds,
        step=s.step,
        rate=response.rate if response.cuts else 1.0,
        rate_from=s.step,
        rate_steps=response.rate_steps if response.cuts else 0,
        exclude=resolve_nodes(s, response.exclude),
    )
    if response.action < Action.ROLL_BACK:
        if not any(_is_same(line, earlier) for earlier in s.history):  # else the line was written before a restart
            begin(s, line)
        return None
    if response.action is Action.ROLL_BACK:
        with s.enter_phase("recovery"):
            went = roll_back(s, response, line)
        return None if went else replace(stop, evidence=f"{evidence}; there is no checkpoint to roll back to")
    if response.action is Action.RESTART and (response.before_step is not None or response.skip):
        way = next(return_points(s, response, line), None)
        if way is None:
            return replace(stop, evidence=f"{evidence}; there is no checkpoint to restart from")
        line = way[1]
    begin(s, line)
    return replace(stop, why=line.action, requeue=set(response.kinds) == {STORE_LOST})


def resolve_nodes(s: Session, names: Iterable[str]) -> tuple[str, ...]:
    """Return names of nodes, with each rank ("rank 3") replaced by the name of its node."""
    ranks = {f"rank {rank}": node for rank, node in enumerate(s.nodes)}
    return tuple(dict.fromkeys(ranks.get(name, name) for name in names))


def _is_same(line: Attempt, earlier: Attempt) -> bool:
    return all(getattr(line, name) == getattr(earlier, name) for name in ("attempt", "step", "action", "kinds"))


def announce(s: Session, response: Response, agreed: Agreed) -> None:
    """Write all verdicts to events.jsonl; report those that are not overridden to the user, with the action."""
    overridden = {kind for verdict in agreed.verdicts for kind in verdict.overrides}
    for verdict in agreed.verdicts:
        action = response.action if verdict.kind in response.kinds else verdict.suggestion
        if verdict.kind not in overridden or verdict.kind in verdict.overrides:
            s.reporter.note(f"{action.name.lower()}: {verdict}")
        s.record_event("verdict", **verdict.to_dict())
