"""`gangline plan table`: rows of a training budget, and the Markdown that the command prints."""

from __future__ import annotations

import pytest

from gangline.cli.main import main
from gangline_basics.cluster.file import Quantity, load_cluster
from gangline_planner import table
from gangline_planner.table import HEAD, TOKENS, plan_row


def test_table_row_plans_20_tokens_per_parameter():
    cluster = load_cluster("h100_ib")
    row = plan_row("8B", 64, cluster)
    plan = row.plan
    assert plan.fits
    assert plan.tokens == TOKENS * plan.explained.parameters == pytest.approx(20 * 8.03e9, rel=0.01)
    assert plan.dollars == pytest.approx(plan.days * 24 * 64 * cluster["price.hour"])
    cells = [cell.strip() for cell in row.text.strip("|").split("|")]
    assert len(cells) == HEAD.count("|") - 1
    assert cells[:3] == ["8B", "64", "161 G"]
    assert cells[5] == f"{plan.days:.3g}"


def test_row_reports_missing_layout_or_price():
    assert "no layout fits" in plan_row("1T", 8, load_cluster("h100_ib")).text
    assert "price unknown" in plan_row("8B", 8, load_cluster("b200_ib")).text


def test_row_reports_failures_that_stop_progress():
    often = {"failure.hours": Quantity(1e-3, "a test")}
    row = plan_row("8B", 64, load_cluster("h100_ib").replace_numbers(often))
    assert row.plan.fits
    assert "failures leave no time to train" in row.text
    assert row.text.count("|") == HEAD.count("|")
    assert "no layout fits" not in row.text


def test_the_command_prints_markdown_with_its_sources(monkeypatch, capsys):
    monkeypatch.setattr(table, "WORLDS", (8,))
    monkeypatch.setattr(table, "MODELS", {"1T": table.MODELS["1T"]})
    assert main(["plan", "table", "cluster=h100_ib"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in lines[:3]] == [HEAD.count("|")] * 3
    assert any("Amazon EC2 Capacity Blocks" in line for line in lines)
    assert main(["plan", "table", "model=tiny", "cluster=h100_ib"]) == 2
    assert "table accepts only cluster=NAME|FILE, got model=tiny" in capsys.readouterr().err
