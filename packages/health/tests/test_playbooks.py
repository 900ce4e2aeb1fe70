"""Playbooks: which order follows from verdicts and history, and that no run goes round in circles."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from gangline.health import Action, Agreed, Order, Verdict
from gangline.tools import Attempt
from gangline_health.config import Budget, Playbook, Playbooks
from gangline_health.playbooks import respond, used


def verdict(kind: str = "loss-spike", step: int = 500, row: int = 3, **details) -> Verdict:
    return Verdict(kind, f"step {step}", 1.0, "loss 9", Action.SKIP, details={"step": step, "row": row, **details})


def line(order: str, step: int, *kinds: str) -> Attempt:
    return Attempt(1, None, order=order, step=step, kinds=kinds or ("loss-spike",))


def asked(*verdicts: Verdict, history: tuple[Attempt, ...] = (), playbooks: Playbooks | None = None) -> Order | None:
    now = max((int(v.details["step"]) for v in verdicts), default=0)
    return respond(playbooks or Playbooks(), Budget(), Agreed(verdicts, history, 0.0), now)


def test_a_playbook_is_patient() -> None:
    assert asked(verdict(row=2)) is None
    assert asked(verdict(kind="of-a-stranger")) is None
    order = asked(verdict(row=3, first=498))
    assert order is not None
    assert (order.action, order.before_step, order.else_before, order.skip) == (Action.ROLL_BACK, 398, 498, None)


def test_it_climbs_while_there_is_no_progress_and_begins_again_after_some() -> None:
    twice = (line("roll_back", 500), line("roll_back", 450))
    order = asked(verdict(), history=twice)
    assert order is not None
    assert (order.action, order.why) == (Action.STOP, "answer 3 to loss-spike without 200 steps of progress")
    later = asked(verdict(step=700), history=twice)
    assert later is not None
    assert later.action is Action.ROLL_BACK
    other = asked(verdict(), history=(line("roll_back", 500, "corruption"),) * 2)
    assert other is not None
    assert other.action is Action.ROLL_BACK


def test_the_budget_of_the_run_counts_all_kinds() -> None:
    history = tuple(line("roll_back", 490, f"kind-{n}") for n in range(6))
    order = asked(verdict(), history=history)
    assert order is not None
    assert order.action is Action.STOP
    assert order.why == "the budget is spent: 6 returns and restarts without 200 steps of progress"


def test_of_several_the_strongest_answers_all() -> None:
    order = asked(verdict(), verdict(kind="gradient-spike"))
    assert order is not None
    assert (order.action, set(order.kinds)) == (Action.ROLL_BACK, {"loss-spike", "gradient-spike"})


def test_lower_rate_leaves_the_step_out_that_a_verdict_would() -> None:
    order = asked(verdict(kind="gradient-spike"))
    assert order is not None
    assert (order.action, order.rate, order.rate_steps, order.changes_course) == (Action.SKIP, 0.5, 100, True)


def test_exclude_names_hosts_or_warns() -> None:
    playbooks = Playbooks(loss_spike=Playbook(["exclude"]))
    assert asked(verdict(), playbooks=playbooks) == Order(Action.WARN, ("loss-spike",))
    order = asked(verdict(host="node-7"), playbooks=playbooks)
    assert order == Order(Action.RESTART, ("loss-spike",), exclude=("node-7",))


@given(
    st.lists(st.tuples(st.sampled_from(["loss-spike", "not-finite", "divergence"]), st.integers(1, 60)), max_size=200),
    st.integers(1, 50),
)
@settings(max_examples=60, deadline=None)
def test_no_run_goes_round_in_circles(faults: list[tuple[str, int]], back: int) -> None:
    """Whatever comes and however soon: without progress there are no more returns than the budget allows."""
    budget, step, history = Budget(orders=4, progress=40), 0, []
    for kind, later in faults:
        step += later
        found = Agreed((verdict(kind, step),), tuple(history), 0.0)
        order = respond(Playbooks(), budget, found, step)
        assert order is not None
        history.append(line(order.action.name.lower(), step, *order.kinds))
        if order.action is Action.STOP:
            break
        step = max(0, step - back)
    turns = [line for line in history if line.order == "roll_back"]
    for n in range(len(turns)):
        assert used(turns[: n + 1], budget.progress, turns[n].step) <= budget.orders
    furthest = max((line.step for line in history), default=0)
    assert len(turns) <= budget.orders * (furthest // budget.progress + 1)
