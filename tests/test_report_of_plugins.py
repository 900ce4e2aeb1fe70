"""`gangline report` of a run with experts, injected faults and a rollback: sections that plugins fill."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from gangline_basics.runs.report.command import main as report
from gangline_health.commands.report import run as health_report
from gangline_moe.load_history import compute_shares, list_layers, load_history
from gangline_testkit import RealRuns


def read_rows(page: str) -> list[list[str]]:
    """Return the cells of every row of every table."""
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]


def test_report_shows_ledger_faults_and_experts(tmp_path: Path, capsys) -> None:
    faults = "health.chaos.at=[kill@12:1,nan@22:1]"
    rollback = [f"health.monitors.playbooks.not_finite.{word}" for word in ("actions=[roll_back]", "patience=1")]
    words = ["moe=on", "parallel=ddp", "launch.processes=2", "launch.max_restarts=2", "health=[monitors,chaos]"]
    with RealRuns(tmp_path, settings=()) as runs:
        wide = ["run.steps=30", "checkpoint.every=5", "track=[jsonl]", "track.jsonl.figure=false"]
        runs.train("run.dir=wild", "recipe=quick", *words, *wide, *rollback, faults)
        run = tmp_path / "wild"
        assert report([str(run)]) == 0
        attempts = runs.read_attempts("wild")
    page = (run / "report.html").read_text()
    rows = read_rows(page)
    capsys.readouterr()
    assert health_report([str(run), "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert f"<dt>goodput</dt><dd>{ledger['ettr']:.1%}</dd>" in page
    for kind, seconds in ledger["seconds"].items():
        share = f"{seconds / ledger['wall_seconds']:.1%}"
        assert [kind.replace("_", " "), f"{seconds:.2f}", share] in rows
    evidence = {fault["named"] for fault in ledger["faults"]}
    assert len(evidence) == 2
    assert evidence == {row[3].partition(": ")[2] for row in rows if len(row) == 4 and row[2].endswith(" s")}
    (back,) = [line for line in attempts if line["attempt"] == 2]
    assert [row for row in rows if row[:1] == ["2"] and row[3] == back["start"]]
    assert "Vertical lines mark restarts (dashed)" in page
    assert "rollbacks (dotted)" in page
    assert "injected fault (kill)" in re.search(r"First failure: </b>([^<]*)", page)[1]
    steps = load_history(run)
    late = [step for step in steps if step.step > 27]
    for layer in list_layers(steps):
        shares = compute_shares(late, layer)
        idle = ", ".join(str(expert) for expert, share in enumerate(shares) if share == 0) or "none"
        assert [layer, str(len(shares)), f"{max(shares):.2f}", f"{min(shares):.2f}", idle] in rows
