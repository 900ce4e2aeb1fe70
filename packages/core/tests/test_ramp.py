"""`batch.ramp`: global batch size as a function of the cursor, on any layout and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from gangline.config.check import check
from gangline.config.compose import compose
from gangline.config.sections import BatchSection
from gangline.errors import UserError
from gangline.run.attempts import Attempt, find_next_cursor
from gangline_testkit import RealRuns

RAMP = ("recipe=tiny", "run.sample=0", "batch.ramp={4:18,8:50}", "batch.global_size=16", "validate.every=null")
FIRST = [0, 4, 8, 12, 16, 20, 28, 36, 44, 52, 68, 84]  # batches of 4 until sample 18, of 8 until 50, then of 16


def test_batch_ramp_matches_on_two_ranks_and_resume(runs: RealRuns) -> None:
    runs.settings = (
        *runs.settings,
        *RAMP,
        "run.steps=12",
        "schedule.warmup_steps=1",
        "schedule=constant",
        "precision=fp64",
    )
    runs.train("run.dir=straight", "batch.micro_size=2")
    straight = runs.read_records("straight")
    assert [record["first_sample"] for record in straight] == FIRST
    assert [record["tokens"] / straight[0]["tokens"] for record in straight] == [1] * 5 + [2] * 4 + [4] * 3
    runs.train("run.dir=two", "run.steps=7", "batch.micro_size=2", "parallel=ddp", "launch.processes=2")
    runs.train("resume=two", "run.steps=12", "parallel=single", "launch.processes=1", "batch.micro_size=1")
    again = runs.read_records("two")
    assert [record["first_sample"] for record in again] == FIRST
    for here, there in zip(straight, again, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-10), here["step"]
        assert here["tokens"] == there["tokens"]


@settings(max_examples=200, deadline=None)
@given(
    ramp=st.dictionaries(st.integers(1, 20), st.integers(1, 200), max_size=4),
    size=st.integers(1, 40),
    steps=st.integers(0, 80),
)
def test_ramp_cursor_after_steps_matches_loop(ramp: dict[int, int], size: int, steps: int) -> None:
    batch, cursor = BatchSection(global_size=size, ramp=ramp), 0
    for _ in range(steps):
        cursor += batch.get_size(cursor)
    assert batch.compute_cursor(steps) == cursor


def test_skipped_samples_may_end_ramp_stage() -> None:
    batch = BatchSection(global_size=8, ramp={2: 10})
    lines = [Attempt(2, None, skipped=20, skipped_from=4)]
    assert find_next_cursor(lines, 2, batch.get_size) == 2
    assert find_next_cursor(lines, 3, batch.get_size) == 24
    assert batch.get_size(24) == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("batch.ramp={8:20,4:40}",),
            "sizes of batch.ramp must grow up to batch.global_size=16, but are: 8 until sample 20, 4 until sample 40",
        ),
        (("batch.ramp={16:20}",), "must grow up to"),
        (("batch.ramp={4:20,8:20}",), "must grow up to"),
        (("batch.micro_size=null",), "needs batch.micro_size"),
        (("batch.ramp={6:20}",), "6 is not divisible by batch.micro_size=4 x 1 data-parallel ranks"),
        (("batch.ramp={6:20}",), "Nearest: 4 or 8"),
        (("parallel=ddp", "launch.processes=2"), "4 is not divisible by batch.micro_size=4 x 2 data-parallel ranks"),
        (("batch.ramp={4:0}",), "batch.ramp"),
        (("batch.ramp={4:x}",), "batch.ramp"),
    ],
)
def test_invalid_ramp_stage_is_refused(words: tuple[str, ...], said: str) -> None:
    usual = [] if words[0].startswith("batch.ramp") else ["batch.ramp={4:20}"]

    def refused() -> None:
        (run,) = compose(["recipe=tiny", "batch.micro_size=4", *usual, *words])
        check(run)

    with pytest.raises(UserError) as error:
        refused()
    assert said in str(error.value)


def test_resume_with_changed_ramp_is_refused(tmp_path: Path) -> None:
    from gangline.config.resume import continue_run
    from gangline.config.serial import to_dict

    (run,) = compose([*RAMP, "batch.micro_size=4", f"run.dir={tmp_path}"])
    with pytest.raises(UserError, match=r"cannot change batch\.ramp"):
        continue_run(str(tmp_path), to_dict(run), ["batch.ramp.4=30"])
    assert continue_run(str(tmp_path), to_dict(run), ["batch.micro_size=2"])[0].batch.ramp == {4: 18, 8: 50}
