"""`gangline report` of real runs in every state, and of damaged, hostile, long and other users' run directories."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from report_pages import QUICK, copy, read_lines, write_lines, write_report

from gangline.config.compose import compose
from gangline.errors import UserError
from gangline.run.directory import RunDirectory
from gangline.run.lock import RunLock
from gangline_basics.runs.listing import read_summary
from gangline_basics.runs.report.command import main as report
from gangline_basics.runs.report.plots import format_number
from gangline_testkit import RealRuns

EVIL = "</title><script>alert('x')</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the runs `done` and `fast`, which only the tests that copy it may change."""
    directory = tmp_path_factory.mktemp("quick")
    with RealRuns(directory, settings=()) as runs:
        runs.train("run.dir=done", *QUICK, "checkpoint.every=10")
        runs.train("run.dir=fast", *QUICK, "optimizer.learning_rate=0.01", "schedule=wsd")
    return directory


def test_report_numbers_equal_the_run_files(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = quick / "done"
    page, lines = write_report(run), read_lines(run)
    assert capsys.readouterr().out.splitlines()[-1] == str(run / "report.html")
    assert page.headings == [
        "Curves", "Time", "Verdicts and notices", "Layout", "Configuration", "Provenance"
    ]  # fmt: skip
    facts = page.facts
    assert facts["last step"] == "20 of 20"
    assert facts["training loss"] == f"{lines[-1]['loss']:.4f} at step 20"
    best = min(lines, key=lambda line: line["loss"])
    assert facts["best training loss"] == f"{best['loss']:.4f} at step {best['step']}"
    validated = [line for line in lines if line["validation_loss"] is not None]
    assert [line["step"] for line in validated] == [5, 10, 15, 20]
    assert facts["validation loss"] == f"{validated[-1]['validation_loss']:.4f} at step 20"
    assert facts["tokens"] == f"{sum(line['tokens'] for line in lines) / 1000:.3g} k"
    assert facts["peak memory of rank 0"] == f"{max(line['memory_bytes'] for line in lines) / 1e9:.3g} GB"
    assert f"train resume={run} run.steps=40" in page.html
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "memory_bytes", "step_seconds"):
        values = [line[name] for line in lines]
        wanted = [format_number(value) for value in (values[0], values[-1], min(values), max(values))]
        assert page.find_row(name) == [name, "20", *wanted]
    spent = [line["seconds"]["forward_backward"] for line in lines]
    assert page.find_row("seconds/forward_backward")[2:] == [
        format_number(value) for value in (spent[0], spent[-1], min(spent), max(spent))
    ]
    (attempt,) = read_lines(run, "attempts.jsonl")
    assert page.find_row("1")[2:4] == ["0", "start of the run"]
    assert attempt["time"][11:19] in page.find_row("1")[1]
    assert page.find_row("tp") == ["tp", "tensor parallel", "1", "none: one rank"]
    assert page.find_row("optimizer", "adamw")
    assert page.find_row("run.steps") == ["run.steps", "20", "300"]
    assert page.find_row("optimizer.clip_norm") == ["optimizer.clip_norm", "1.0"], "equal to its default"
    (start,) = json.loads((run / "provenance.json").read_text())["starts"]
    assert page.find_row("version of torch")[1] == start["versions"]["torch"]
    assert page.find_row("git commit of gangline")[1].startswith(start["code"]["gangline"]["commit"])
    data = json.loads((run / "provenance.json").read_text())["data"]
    assert page.find_row("data", f"{data['fingerprint']}, {data['is']}")
    assert "recipe=quick" in page.html


def test_phases_of_steps_are_summed_by_basics_alone(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline_basics.runs.report.time.CAPABILITY", "no plugin has this capability")
    page, lines = write_report(quick / "done"), read_lines(quick / "done")
    total = sum(line["seconds"]["forward_backward"] for line in lines)
    wall = lines[-1]["time"] - lines[0]["time"] + lines[0]["step_seconds"]
    assert page.find_row("forward_backward") == ["forward_backward", f"{total:.2f}", f"{total / wall:.1%}"]
    assert page.facts["goodput"] == "not known"


def test_comparison_shows_options_results_and_curves(quick: Path, tmp_path: Path) -> None:
    page = write_report(quick / "done", quick / "fast", "--out", tmp_path / "both.html")
    ends = [f"{read_lines(quick / name)[-1]['loss']:.4f} at step 20" for name in ("done", "fast")]
    assert page.find_row("training loss") == ["training loss", *ends]
    assert page.find_row("option") == ["option", "done", "fast"]
    assert page.find_row("optimizer.learning_rate") == ["optimizer.learning_rate", "0.003", "0.01"]
    assert page.find_row("schedule") == ["schedule", "cosine", "wsd"]
    assert not any(row[0] == "run.dir" for row in page.rows)
    assert page.tags["svg"] == 7
    labels = dict(re.findall(r'aria-label="([^"]*?): (done: [^"]*)"', page.html))
    assert all(f"last {end}" in labels["training loss (nats)"] for end in ends)
    assert "fast: " in labels["learning rate"]
    write_report(quick / "done", quick / "fast")
    assert (quick / "done" / "report.html").read_text() == page.html


def test_two_reports_of_a_run_have_equal_bytes(quick: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        command = [sys.executable, "-m", "gangline", "report", str(quick / "done"), "--out", f"{tmp_path / name}.html"]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": str(len(name) + ord(name[0]))})
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


@pytest.mark.parametrize("state", ["new", "running", "killed", "failed", "damaged", "preempted"])
def test_report_shows_each_state_of_a_run(quick: Path, tmp_path: Path, state: str) -> None:
    run, lock = tmp_path / "a", RunLock(tmp_path / "a")
    if state == "new":
        (made,) = compose(["recipe=quick", f"run.dir={run}"])
        RunDirectory.create(made).unlock()
    else:
        copy(quick / "done", run)
        ending = json.loads((run / "ending.json").read_text())
        (run / "ending.json").unlink()
    if state == "running":
        lock.take()
    elif state in ("failed", "preempted"):
        reason = "bug" if state == "failed" else "preempted"
        (run / "ending.json").write_text(json.dumps({**ending, "reason": reason, "evidence": "rank 1 was lost"}))
    elif state == "damaged":
        (run / "config.yaml").unlink()
    try:
        page = write_report(run)
        assert read_summary(run).state == state
    finally:
        lock.release()
    assert ("class", f"state {state}") in page.attributes
    text = " ".join(page.notes)
    assert ("train resume=" in text) == (state in ("killed", "failed", "preempted"))
    assert ("rank 1 was lost" in text) == (state in ("failed", "preempted"))
    if state == "new":
        assert page.facts["training loss"] == "not recorded"
        assert "metrics.jsonl holds no step yet" in text
        assert "train from=" in text
    if state == "damaged":
        assert "config.yaml" in text
        assert page.find_row("loss")[1] == "20"


def test_restarts_rollbacks_and_nan_losses_are_marked(quick: Path, tmp_path: Path) -> None:
    run = copy(quick / "done", tmp_path / "a")
    lines = read_lines(run)
    for line in lines:
        line.update(generation=1 + (line["step"] > 7), attempt=1 + (line["step"] > 12))
        line["metrics"] = {"dpo/accuracy": 0.5 + line["step"] / 100, "layer.1/x": 1.0, "layer.2/x": 2.0}
    lines[3]["loss"], lines[3]["skipped"] = "nan", "not finite"
    write_lines(run, lines)
    page = write_report(run)
    assert "Vertical lines mark restarts (dashed) before steps 8 and rollbacks (dotted) before steps 13." in page.notes
    assert "1 value that is not finite, first at step 4" in page.html
    titles = set(re.findall(r"<title>([^<]*)</title>", page.html))
    assert {"restart before step 8", "rollback before step 13", "not finite at step 4"} <= titles
    assert page.find_row("dpo/accuracy") == ["dpo/accuracy", "20", "0.5100", "0.7000", "0.5100", "0.7000"]
    assert {"dpo/accuracy", "layer.#/x"} <= titles
    assert page.find_row("step 4", "update skipped") == ["step 4", "update skipped", "not finite"]


def test_failures_come_first_and_oldest_first(quick: Path, tmp_path: Path) -> None:
    run = copy(quick / "done", tmp_path / "a")
    about = {"time": "2026-01-02T03:04:05.678+00:00", "host": "h", "by": "rank", "generation": 1, "step": 7}
    verdict = {"event": "verdict", **about, "where": "step 7", "confidence": 1.0}
    events = [
        {**verdict, "kind": "info", "evidence": "only a note", "suggestion": "note"},
        {**verdict, "kind": "not-compared", "evidence": "too few ranks", "suggestion": "warn"},
        {**verdict, "kind": "loss-spike", "evidence": "loss 9", "suggestion": "roll_back"},
        {"event": "launch", **about, "why": "rank", "evidence": "rank 1 failed first", "processes": 2},
    ]
    write_lines(run, read_lines(run, "events.jsonl") + events, "events.jsonl")
    page = write_report(run)
    rows = [row for row in page.rows if row and row[0] == "step 7, 2026-01-02 03:04:05"]
    grave = ["verdict not-compared (step 7)", "verdict loss-spike (step 7)", "restart (rank)"]
    assert [row[1] for row in rows] == [*grave, "verdict info (step 7)"]
    first = "First failure: step 7, 2026-01-02 03:04:05, verdict loss-spike (step 7): loss 9; suggestion: roll_back"
    assert first in page.notes


def test_experts_heat_map_shows_recorded_loads(quick: Path, tmp_path: Path) -> None:
    run = copy(quick / "done", tmp_path / "a")
    lines = read_lines(run)
    for line in lines:
        line["metrics"] = {"blocks.0/load": [30.0, 10.0, 0.0, 40.0], "blocks.1/load": [5.0, 5.0, 5.0, 5.0]}
    write_lines(run, lines)
    page = write_report(run)
    assert page.find_row("blocks.0") == ["blocks.0", "4", "2.00", "0.00", "2"]
    assert page.find_row("blocks.1") == ["blocks.1", "4", "1.00", "1.00", "none"]
    assert "largest load / mean load 2.00" in page.html
    assert "Experts" not in write_report(quick / "done").headings


def test_hostile_text_is_escaped_everywhere(quick: Path, tmp_path: Path) -> None:
    run = copy(quick / "done", tmp_path / "<b>a & b")
    config = (run / "config.yaml").read_text()
    evil = json.dumps(EVIL + "\x07")
    config = config.replace("name: quick", f"name: {evil}").replace("text_field: text", f"text_field: {evil}")
    (run / "config.yaml").write_text(config)
    lines = read_lines(run)
    for line in lines:
        line["metrics"] = {EVIL: 1.0, f"{EVIL}/load": [1.0, 2.0], "\ud800 lone": 1.0}
        line["notes"] = [EVIL]
    write_lines(run, lines)
    verdict = {"event": "verdict", "kind": EVIL, "where": EVIL, "evidence": EVIL, "suggestion": EVIL, "time": EVIL}
    start = {"event": "start", "time": EVIL, "nodes": [EVIL], "mesh": {EVIL: 2}, "processes": EVIL}
    write_lines(run, [*read_lines(run, "events.jsonl"), verdict, start], "events.jsonl")
    provenance = json.loads((run / "provenance.json").read_text())
    provenance["starts"][-1].update(command=["train", EVIL], versions={EVIL: EVIL})
    (run / "provenance.json").write_text(json.dumps(provenance))
    for words in ([run], [run, quick / "fast", "--out", tmp_path / "both.html"]):
        page = write_report(*words)
        assert not {"script", "img", "iframe", "object", "link", "base", "form"} & set(page.tags)
        assert page.html.count("&lt;script&gt;") > 5
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert "\x07" not in page.html


def test_page_loads_nothing_and_allows_only_styles(quick: Path, tmp_path: Path) -> None:
    for words in ([quick / "done"], [quick / "done", quick / "fast", "--out", tmp_path / "both.html"]):
        page = write_report(*words)
        assert "http" not in page.html.replace("http-equiv", "")
        assert not {"src", "srcset", "data", "action"} & {name for name, _ in page.attributes}
        links = [value for name, value in page.attributes if name == "href"]
        assert all(link.startswith("#") for link in links)
        identities = [value for name, value in page.attributes if name == "id"]
        assert {link[1:] for link in links} <= set(identities)
        policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
        assert ("content", policy) in page.attributes
        assert (
            page.html.count("<svg") == page.html.count('role="img"') == len(re.findall(r"<svg[^>]*><title>", page.html))
        )


def test_secrets_are_not_resolved_or_shown(quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_TEST_SECRET", "hunter2hunter2")
    run = copy(quick / "done", tmp_path / "a")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("text_field: text", "text_field: ${oc.env:GANGLINE_TEST_SECRET}"))
    provenance = json.loads((run / "provenance.json").read_text())
    provenance["starts"][-1]["command"].append("track.wandb.api_key=hunter2hunter2")
    (run / "provenance.json").write_text(json.dumps(provenance))
    page = write_report(run)
    assert page.find_row("data.text_field") == ["data.text_field", "${oc.env:GANGLINE_TEST_SECRET}", "text"]
    assert "hunter2" not in page.html


def test_long_run_fits_two_megabytes_and_keeps_extremes(quick: Path, tmp_path: Path) -> None:
    """20,000 steps and 400 metrics; a page does not grow with the number of steps."""
    run = copy(quick / "done", tmp_path / "a")
    line = read_lines(run)[-1]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            metrics = {f"set{n}/x": step / (n + 1) for n in range(400)} if step % 100 == 0 else {}
            loss = 77.5 if step == 12_345 else 3.0
            more = {"step": step, "loss": loss, "time": 1e9 + step, "monotonic": float(step), "metrics": metrics}
            file.write(json.dumps({**line, **more}) + "\n")
    page = write_report(run)
    assert len(page.html) < 2_000_000
    assert "maximum 77.5000 at step 12345" in page.html
    assert "Drawn as median and range (minimum to maximum) of 150 intervals of about 133 steps." in page.html
    assert page.find_row("set399/x")[1] == "200"
    assert "In the table below but without a curve:" in page.html


def test_only_an_earlier_report_is_replaced(quick: Path, tmp_path: Path) -> None:
    run, other = copy(quick / "done", tmp_path / "a"), tmp_path / "thesis.html"
    other.write_text("<html>my work</html>")
    with pytest.raises(UserError, match="exists and is not a report"):
        report([str(run), "--out", str(other)])
    (run / "report.html").symlink_to(other)
    with pytest.raises(UserError, match="is a symbolic link"):
        report([str(run)])
    assert other.read_text() == "<html>my work</html>"
    (run / "report.html").unlink()
    os.mkfifo(run / "report.html")
    with pytest.raises(UserError, match="named pipe"):
        report([str(run)])
    (run / "report.html").unlink()
    assert write_report(run).html == write_report(run).html
    assert not list(run.glob(".report*")), "no temporary file is left"
    with pytest.raises(UserError, match="cannot be written") as refused:
        report([str(run), "--out", str(tmp_path / "none" / "x.html")])
    assert f"mkdir -p {tmp_path / 'none'}" in str(refused.value)


def test_report_of_another_users_run_needs_out(quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = copy(quick / "done", tmp_path / "a")
    monkeypatch.setattr(os, "geteuid", lambda: run.stat().st_uid + 1)
    with pytest.raises(UserError, match="belongs to another user") as refused:
        report([str(run)])
    assert "--out FILE" in str(refused.value)
    before = sorted(path.name for path in run.iterdir())
    assert write_report(run, "--out", tmp_path / "mine.html").facts["last step"] == "20 of 20"
    assert sorted(path.name for path in run.iterdir()) == before


def test_missing_run_and_matplotlib_are_refused(quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is no run directory"):
        report([str(tmp_path / "none")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is not a complete run directory"):
        report([str(tmp_path / "empty")])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="figures need matplotlib") as refused:
        report([str(quick / "done")])
    assert 'pip install "gangline-basics[pictures]"' in str(refused.value)


def test_damaged_files_are_named(quick: Path, tmp_path: Path) -> None:
    run = copy(quick / "done", tmp_path / "a")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:5], "garbage", *lines[6:]]) + "\n")
    for name in ("provenance.json", "events.jsonl", "attempts.jsonl"):
        (run / name).unlink()
    page = write_report(run)
    text = " ".join(page.notes)
    assert "1 record of metrics.jsonl was left out: not valid. First: line 6: not a JSON object." in text
    assert "provenance.json is missing or empty." in text
    assert "events.jsonl is missing or empty." in text
    assert "attempts.jsonl holds no start of the run." in text
    assert "provenance.json records no start." in text
    assert "the layout is not known" in text


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("metrics.jsonl", {"metrics": {"x": "many"}}),
        ("metrics.jsonl", {"seconds": 3}),
        ("events.jsonl", {"mesh": "tp", "nodes": 5, "kinds": 7, "time": 3, "generation": "x"}),
        ("provenance.json", {"starts": [{"command": 5}]}),
        ("provenance.json", {"starts": 5}),
    ],
)
def test_values_of_wrong_types_leave_the_other_sections(quick: Path, tmp_path: Path, name: str, change: dict) -> None:
    run = copy(quick / "done", tmp_path / "a")
    lines = [{**line, **change} for line in (read_lines(run, name) if name.endswith("l") else [{}])]
    write_lines(run, lines, name)
    page = write_report(run)
    assert page.headings == ["Curves", "Time", "Verdicts and notices", "Layout", "Configuration", "Provenance"]
    assert page.find_row("optimizer", "adamw")


def test_report_does_not_import_torch(quick: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from gangline.cli.main import main
assert main(["report", {str(quick / "done")!r}, "--out", {str(tmp_path / "x.html")!r}]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
