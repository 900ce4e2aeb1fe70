"""`health.monitors.playbooks`: the response that follows from verdicts and history, without endless rollbacks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from gangline.health import Action, Agreed, Response, Verdict
from gangline.run.attempts import Attempt
from gangline_health.config import Budget, Playbook, Playbooks
from gangline_health.playbooks import count_used, respond
from gangline_testkit.runs import build_small_run


def verdict(kind: str = "loss-spike", step: int = 500, row: int = 3, **details) -> Verdict:
    return Verdict(kind, f"step {step}", 1.0, "loss 9", Action.SKIP, details={"step": step, "row": row, **details})


def line(action: str, step: int, *kinds: str) -> Attempt:
    return Attempt(1, None, action=action, step=step, kinds=kinds or ("loss-spike",))


def asked(*verdicts: Verdict, history: tuple[Attempt, ...] = (), playbooks: Playbooks | None = None) -> Response | None:
    now = max((int(v.details["step"]) for v in verdicts), default=0)
    return respond(playbooks or Playbooks(), Budget(), Agreed(verdicts, history, 0.0), now)


def test_playbook_acts_after_patience_is_reached() -> None:
    assert asked(verdict(row=2)) is None
    assert asked(verdict(kind="of-a-stranger")) is None
    response = asked(verdict(row=3, first=498))
    assert response is not None
    assert (response.action, response.before_step, response.else_before, response.skip) == (
        Action.ROLL_BACK,
        398,
        498,
        None,
    )


def test_playbook_escalates_without_progress_and_resets_after() -> None:
    twice = (line("roll_back", 500), line("roll_back", 450))
    response = asked(verdict(), history=twice)
    assert response is not None
    assert (response.action, response.why) == (Action.STOP, "response 3 to loss-spike without 200 steps of progress")
    later = asked(verdict(step=700), history=twice)
    assert later is not None
    assert later.action is Action.ROLL_BACK
    other = asked(verdict(), history=(line("roll_back", 500, "corruption"),) * 2)
    assert other is not None
    assert other.action is Action.ROLL_BACK


def test_second_rollback_for_same_fault_uses_older_checkpoint() -> None:
    went = Attempt(2, "step-00000030", action="roll_back", step=33, kinds=("not-finite",))
    for history, details, before in (
        ((), {}, 31),
        ((went,), {}, 30),
        ((went,), {"proven": True}, 31),
        ((line("roll_back", 33),), {}, 31),
    ):
        response = asked(verdict("not-finite", step=33, first=31, **details), history=history)
        assert response is not None
        assert (response.before_step, response.else_before) == (before, 31)


def test_rollback_budget_counts_all_verdict_kinds() -> None:
    history = tuple(line("roll_back", 490, f"kind-{n}") for n in range(6))
    response = asked(verdict(), history=history)
    assert response is not None
    assert response.action is Action.STOP
    assert response.why == (
        "the budget is used up: 6 rollbacks and restarts without 200 steps of progress (health.monitors.budget)"
    )


def test_strongest_action_answers_all_verdicts() -> None:
    response = asked(verdict(), verdict(kind="gradient-spike"))
    assert response is not None
    assert (response.action, set(response.kinds)) == (Action.ROLL_BACK, {"loss-spike", "gradient-spike"})


def test_learning_rate_reduction_also_skips_step() -> None:
    response = asked(verdict(kind="gradient-spike"))
    assert response is not None
    assert (response.action, response.rate, response.rate_steps, response.changes_course) == (
        Action.SKIP,
        0.5,
        100,
        True,
    )


def test_restart_checkpoint_predates_the_first_verdict() -> None:
    """Check restarts after corruption: the newest checkpoint may be corrupt, and all replicas would load it."""
    for action, does in (("roll_back", Action.ROLL_BACK), ("restart", Action.RESTART), ("exclude", Action.RESTART)):
        playbooks = Playbooks(corruption=Playbook([action], skip=False, back=10))
        response = asked(verdict("corruption", first=401, exclude="rank 2"), playbooks=playbooks)
        assert response is not None
        assert (response.action, response.before_step, response.else_before, response.skip) == (does, 391, 401, 0)
        assert response.exclude == (("rank 2",) if action == "exclude" else ())
    slow = asked(verdict("straggler", exclude="rank 2"), playbooks=Playbooks(straggler=Playbook(["exclude"])))
    assert slow is not None
    assert (slow.action, slow.before_step, slow.exclude) == (Action.RESTART, None, ("rank 2",))


def test_exclusion_without_a_rank_escalates() -> None:
    once = (line("roll_back", 500, "corruption"),)
    response = asked(verdict("corruption", first=401), history=once)
    assert response is not None
    assert response.action is Action.STOP
    for kind, details, does in (("loss-spike", {"first": 498}, Action.ROLL_BACK), ("straggler", {}, Action.STOP)):
        only = Playbooks(**{kind.replace("-", "_"): Playbook(["exclude"])})
        response = asked(verdict(kind, **details), playbooks=only)
        assert response is not None
        assert response.action is does


def test_two_simultaneous_actions_are_both_applied() -> None:
    playbooks = Playbooks(corruption=Playbook(["exclude"], skip=False))
    found = (verdict("corruption", first=401, exclude="rank 2"), verdict("gradient-spike"), verdict(first=450))
    response = asked(*found, playbooks=playbooks)
    assert response is not None
    assert (response.action, response.exclude, response.rate, response.rate_steps) == (
        Action.RESTART,
        ("rank 2",),
        0.5,
        100,
    )
    assert (response.before_step, response.else_before) == (350, 401)
    back = asked(verdict("corruption", first=401), verdict(first=450))
    assert back is not None
    assert (back.action, back.before_step, back.skip) == (Action.ROLL_BACK, 350, None)


@given(
    st.lists(st.tuples(st.sampled_from(["loss-spike", "not-finite", "divergence"]), st.integers(1, 60)), max_size=200),
    st.integers(1, 50),
)
@settings(max_examples=60, deadline=None)
def test_rollbacks_without_progress_stay_within_budget(faults: list[tuple[str, int]], back: int) -> None:
    """Check random sequences of faults, with random numbers of steps between faults."""
    budget, step, history = Budget(responses=4, progress=40), 0, []
    for kind, later in faults:
        step += later
        found = Agreed((verdict(kind, step),), tuple(history), 0.0)
        response = respond(Playbooks(), budget, found, step)
        assert response is not None
        history.append(line(response.action.name.lower(), step, *response.kinds))
        if response.action is Action.STOP:
            break
        step = max(0, step - back)
    turns = [line for line in history if line.action == "roll_back"]
    for n in range(len(turns)):
        assert count_used(turns[: n + 1], budget.progress, turns[n].step) <= budget.responses
    furthest = max((line.step for line in history), default=0)
    assert len(turns) <= budget.responses * (furthest // budget.progress + 1)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "loss_spike.rate_steps=5",
            "loss_spike.rate_steps has no effect: health.monitors.playbooks.loss_spike.rate is 1",
        ),
        ("loss_spike.rate=0.5", "rate_steps is 0"),
        ("straggler.rate=0.5", "contains none of roll_back, restart, lower_rate"),
        ("straggler.back=5", "contains none of roll_back, restart, exclude"),
        ("straggler.skip=false", "contains none of roll_back, restart, exclude"),
        ("straggler.actions=[exclude]", "straggler.actions: exclude only restarts ranks with this launcher"),
        ("loss_spike.actions=[warn]", ""),
        ("loss_spike.back=5", ""),
        ("divergence.rate=0.1", ""),
    ],
)
def test_playbook_option_without_effect_is_noted(setting: str, said: str) -> None:
    run = build_small_run("health=[monitors]", "checkpoint.every=10", f"health.monitors.playbooks.{setting}")
    notices = run.health["monitors"].list_notices(run)
    assert [said in notice for notice in notices] == ([True] if said else [])
    run = build_small_run("health=[monitors]", "launch=elastic", "checkpoint.every=10")
    assert run.health["monitors"].list_notices(run) == []
