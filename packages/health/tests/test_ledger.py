"""Ledger of `gangline health report`: each second of wall-clock time has one category, after any kill."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from gangline import UserError
from gangline.config.compose import compose_one
from gangline.run.directory import RunDirectory
from gangline.train.rank import train
from gangline_basics.figure import render
from gangline_health.commands.report import run as report
from gangline_health.ledger.picture import draw_ledger
from gangline_health.ledger.report import Ledger, build_ledger
from gangline_health.ledger.spans import KINDS, Span, flatten_spans, sum_seconds
from gangline_testkit import list_readable, list_tips, list_words
from gangline_testkit.sessions import open_session

BEGAN = 1.7e9


class Files:
    """Writer of the files of a run, with a simulated clock."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.now, self.generation = run_dir, BEGAN, 0
        self.off = 0.0  # offset of the wall clock after it was set, in seconds
        run_dir.mkdir(parents=True, exist_ok=True)

    def _line(self, file: str, **content: object) -> None:
        with (self.run_dir / file).open("a") as out:
            out.write(json.dumps(content) + "\n")

    def event(self, event: str, **content: object) -> None:
        time = datetime.fromtimestamp(self.now + self.off, UTC).isoformat(timespec="milliseconds")
        self._line("events.jsonl", event=event, time=time, monotonic=self.now, generation=self.generation, **content)

    def launch(self, why: str, found: float | None = None, evidence: str = "") -> None:
        self.generation += 1
        seen = (
            None if found is None else datetime.fromtimestamp(found + self.off, UTC).isoformat(timespec="milliseconds")
        )
        self.event("launch", why=why, evidence=evidence, found=seen)
        self.now += 2.0
        self.event("start", mesh={"dp_replicate": 2}, processes=2)
        self.phase("build", 0.5)
        self.phase("restore", 0.25)

    def clocks(self) -> dict[str, float]:
        return {"time": self.now + self.off, "monotonic": self.now}

    def phase(self, name: str, seconds: float) -> None:
        self.event("phase", phase=name, at="begin")
        self.now += seconds
        self.event("phase", phase=name, at="end", seconds=seconds)

    def step(self, step: int, passes: float = 1.0, waits: float = 0.25, skipped: str = "", **more: int) -> None:
        """Write a step with 0.125 s each of data and update; the sync of 0.0625 s counts to the next step."""
        self.now += passes + 0.25
        took = {"data": 0.125, "forward_backward": passes, "optimizer": 0.125, "sync": 0.0625}
        content = {"step": step, "seconds": took, "step_seconds": passes + 0.3125, "skipped": skipped, **more}
        rows = {"collective": [waits, waits]}
        self._line("metrics.jsonl", **content, **self.clocks(), generation=self.generation, rank_phases=rows)
        self.now += 0.0625


def whole(of: Ledger) -> None:
    assert sum(of.seconds.values()) == pytest.approx(of.wall_seconds, abs=1e-6)
    assert min(of.seconds.values()) >= 0
    assert [part.begin for part in of.parts[1:]] == [part.end for part in of.parts[:-1]]


def test_invalid_lines_are_skipped(tmp_path: Path) -> None:
    files = Files(tmp_path / "whole")
    files.launch("start")
    for step in (1, 2):
        files.step(step)
    odd = Files(tmp_path / "odd")
    odd.launch("start")
    for file in ("events.jsonl", "metrics.jsonl"):
        with (odd.run_dir / file).open("a") as out:
            for time, number in (("soon", 1), (None, 1), (5, "x"), (float("nan"), 1), (5, None), ([], {})):
                line = {"event": "launch", "step": 1, "step_seconds": 1.0, "seconds": {}, "time": time}
                out.write(json.dumps({**line, "generation": number}) + "\n")
            out.write('[1]\n5\n"x"\nnull\n{}\n{"time": 3.0}\n{"time": "x", "step": 1, "seconds": {}}\n{"tim')
            out.write("\n")
    for step in (1, 2):
        odd.step(step)
    found = [build_ledger(each.run_dir).to_dict() for each in (files, odd)]
    assert found[0] | {"run_dir": ""} == found[1] | {"run_dir": ""}


def test_steps_lost_in_damaged_file_are_reported(tmp_path: Path) -> None:
    """Check also a line torn by a kill, which is not reported, because the next start repeats the step."""
    files = Files(tmp_path)
    files.launch("start")
    files.step(1)
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 2, "sec\n')
    files.launch("rank")
    files.step(2)
    told: list[str] = []
    build_ledger(tmp_path, told.append)
    assert told == []
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write("garbage\n")
    files.step(4)
    build_ledger(tmp_path, told.append)
    assert told == [
        f"{tmp_path / 'metrics.jsonl'} is damaged: 1 line does not contain a step record, "
        "so the records of these steps are missing."
    ]


def test_watcher_and_alert_events_are_not_starts(tmp_path: Path) -> None:
    """Check that verdicts of the watcher and of alerts, written after the ranks died, do not count as rank activity."""
    files = Files(tmp_path)
    files.launch("start")
    files.step(1)
    began, files.generation = files.generation, 0
    files.event("verdict", by="watcher", kind="hang")
    files.generation = began
    files.now += 3.0
    files.event("verdict", by="alert", kind="alert-lost")
    files.launch("rank", found=files.now - 1.0)
    files.step(2)
    of = build_ledger(tmp_path)
    whole(of)
    (fault,) = of.faults
    assert (fault.kind, fault.found) == ("rank", pytest.approx(2.0625, abs=0.01))
    assert of.seconds["idle"] == pytest.approx(0.0, abs=0.2)


@pytest.mark.parametrize("moves", [(0.0, 0.0), (600.0, 600.0), (-3600.0, 0.0), (-3600.0, 600.0)])
def test_clock_set_forward_is_reported(tmp_path: Path, capsys, moves: tuple[float, float]) -> None:
    """Check that undoing an earlier set-back of the clock does not count as setting the clock forward."""
    files = Files(tmp_path)
    files.launch("start")
    for step, files.off in enumerate((0.0, *moves), 1):
        files.step(step)
    of = build_ledger(tmp_path)
    whole(of)
    wanted = max(0.0, *moves)
    assert of.clock_forward == of.to_dict()["clock_forward_seconds"] == pytest.approx(wanted, abs=0.01)
    report([str(tmp_path)])
    assert ("a clock was set forward" in capsys.readouterr().out) == bool(wanted)


@pytest.mark.parametrize("at", range(6))
def test_clock_set_back_loses_no_seconds(tmp_path: Path, at: int) -> None:
    """Check a clock set back at each step of the run, also with the clock set forward again later."""
    found = []
    before_1970 = -3e9
    for steps in ((), ((at, -3600.0),), ((at, before_1970),), ((at, -7200.0), (at + 1, -5.0), (at + 2, 0.0))):
        files = Files(tmp_path / str(len(found)))
        set_to = dict(steps)
        files.launch("start")
        for step in (1, 2, 3):
            files.off = set_to.get(step - 1, files.off)
            files.step(step)
        killed = files.now
        files.now += 4.0
        files.off = set_to.get(3, files.off)
        files.launch("rank", found=killed + 3.0)
        for step in (3, 4, 5):
            files.off = set_to.get(step + 1, files.off)
            files.step(step)
        of = build_ledger(files.run_dir)
        whole(of)
        found.append((of.wall_seconds, of.seconds, [(fault.at, fault.found, fault.named) for fault in of.faults]))
    for wall, spent, faults in found[1:]:
        assert wall == pytest.approx(found[0][0], abs=0.01)
        assert spent == pytest.approx(found[0][1], abs=0.01)
        assert faults[0][:2] == pytest.approx(found[0][2][0][:2], abs=0.01)


def test_ledger_seconds_of_killed_run_are_exact(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.launch("start")
    files.step(1, passes=3.0)  # including two seconds of compilation
    for step in (2, 3):
        files.step(step)
    files.phase("save", 0.5)
    for step in (4, 5):
        files.step(step)
    killed = files.now
    files.now += 4.0
    files.launch("rank", found=killed + 3.0, evidence="rank 1 failed first: killed by SIGKILL")
    for step in (4, 5, 6):
        files.step(step)
    files.event("end", why="done")
    of = build_ledger(tmp_path)
    whole(of)
    spent = of.seconds
    assert spent["start"] == pytest.approx(2.75, abs=0.01)
    assert spent["compile"] == pytest.approx(2.0, abs=0.01)
    assert spent["checkpoint_stall"] == pytest.approx(0.5, abs=0.01)
    assert spent["data_wait"] == pytest.approx(6 * 0.125, abs=0.01)
    assert spent["detection"] + spent["recovery"] == pytest.approx(6.75 + 0.0625 - typical(), abs=0.02)
    assert spent["recovery"] == pytest.approx(1.0 + 2.75, abs=0.01)
    assert spent["lost_work"] == pytest.approx(2 * 1.3125 + typical(), abs=0.15), "steps 4 and 5, and the one under way"
    assert spent["exposed_communication"] >= 6 * 0.25
    (fault,) = of.faults
    assert (fault.kind, fault.named) == ("rank", "rank 1 failed first: killed by SIGKILL")
    assert fault.found == pytest.approx(3.0625, abs=0.01)
    assert fault.recovery_seconds == pytest.approx(1.0 + 2.75 + 1.25, abs=0.01)
    content = of.to_dict()
    assert set(content["seconds"]) == set(KINDS)
    assert content["young_daly"]["checkpoint_seconds"] > 0
    drawn = draw_ledger(of)
    words = list_readable(drawn)
    assert words[0].startswith("Where the time went")
    assert {"the run", "faults", "seconds since the run began", "seconds", "lost work", "data wait"} <= set(words)
    (tip,) = list_tips(render(drawn, ".svg").decode())
    assert tip == "rank: rank 1 failed first: killed by SIGKILL, detected after 3.06 s"
    above, below = drawn.axes
    (fault,) = above.get_lines()
    assert fault.get_xydata()[0][0] == of.faults[0].at
    shares = {collection.get_facecolor()[0].tobytes() for collection in above.collections}
    assert len(shares) == len(below.patches) == len([sum_ for sum_ in spent.values() if sum_ > 0])
    assert sorted(bar.get_width() for bar in below.patches) == sorted(filter(None, spent.values()))


def typical() -> float:
    return 1.3125


@given(st.lists(st.tuples(st.sampled_from("stepkillsaveskip"), st.floats(0.01, 5)), max_size=60), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_ledger_seconds_always_sum_to_wall_clock(
    tmp_path_factory: pytest.TempPathFactory, course: list[tuple[str, float]], back: int
) -> None:
    files = Files(tmp_path_factory.mktemp("run"))
    files.launch("start")
    step = 0
    for word, length in course:
        if word in "step":
            step += 1
            files.step(step, passes=length, waits=length / 3, skipped="spike" if word == "e" else "")
        elif word in "av":
            files.phase("save", length)
        elif word == "k":
            gone = files.now
            files.now += length
            files.launch("node", found=gone + length / 2)
            step = max(0, step - back)
        else:
            files.event("phase", phase="save", at="begin")  # no end: killed or read during the save
            files.now += length
    of = build_ledger(files.run_dir)
    whole(of)
    assert of.seconds["compute"] >= 0


@given(
    st.lists(st.tuples(st.floats(-5, 15), st.floats(-5, 15), st.sampled_from(KINDS), st.integers(0, 2)), max_size=30)
)
@settings(max_examples=100, deadline=None)
def test_flattened_spans_have_no_gap_or_overlap(drawn: list[tuple[float, float, str, int]]) -> None:
    every = [Span(*each) for each in drawn]
    parts = flatten_spans(every, 0.0, 10.0)
    assert (parts[0].begin, parts[-1].end) == (0.0, 10.0)
    assert sum(sum_seconds(parts).values()) == pytest.approx(10.0)
    for part in parts:
        middle = (part.begin + part.end) / 2
        over = [span for span in every if span.begin <= middle < span.end]
        best = max((span.level for span in over), default=None)
        assert part.kind in {span.kind for span in over if span.level == best} if over else part.kind == "idle"


def test_ledger_of_resumed_run_covers_wall_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    s = open_session(out, "run.steps=8", "parallel=single")
    taken = s.runtime.finish_update

    def dies() -> None:
        taken()
        if s.step == 4:
            raise KeyboardInterrupt

    s.runtime.finish_update = dies  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        train(s)
    assert train(open_session(out, "run.steps=8", "parallel=single")) == 0
    whole(build_ledger(out))
    assert report([str(out), "--json", "--svg", str(tmp_path / "run.svg")]) == 0
    content = json.loads(capsys.readouterr().out)
    assert sum(content["seconds"].values()) == pytest.approx(content["wall_seconds"])
    assert content["seconds"]["compute"] > 0
    assert "seconds since the run began" in list_words((tmp_path / "run.svg").read_text())
    assert report([str(out)]) == 0
    assert "where the time went" in capsys.readouterr().out


def test_directory_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains neither events"):
        build_ledger(tmp_path)


def test_ledger_bubble_uses_batch_size_of_each_step(tmp_path: Path) -> None:
    """Check 4 stages with waits longer than the bubble, which is 3/7 of the passes for 4 microbatches, 3/19 for 16."""
    words = ("batch.global_size=16", "batch.micro_size=1", "batch.ramp={4:8}", f"run.dir={tmp_path / 'a'}")
    RunDirectory.create(compose_one(["recipe=tiny", *words])).unlock()
    files = Files(tmp_path / "a")
    files.event("launch", why="start")
    files.event("start", mesh={"pp": 4}, processes=4)
    for step, first in ((1, 0), (2, 4), (3, 8), (4, 24)):
        files.step(step, passes=1.0, waits=0.75, first_sample=first)
    assert build_ledger(tmp_path / "a").seconds["bubble"] == pytest.approx(2 * 3 / 7 + 2 * 3 / 19)
