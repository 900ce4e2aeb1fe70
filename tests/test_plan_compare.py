"""`gangline plan compare`: measured terms of a real run next to the predictions."""

from __future__ import annotations

import json
import shutil

import pytest

from gangline.cli.main import main
from gangline.cli.train import main as train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("compared") / "run"
    words = "parallel=single launch.processes=1 run.steps=5 run.sample=0 run.device=cpu model.layers=2"
    assert train([*words.split(), f"run.dir={path}"]) == 0
    return path


def test_compare_reports_measured_terms_of_run(run_dir, capsys):
    capsys.readouterr()
    assert main(["plan", "compare", str(run_dir), "cluster=h100_ib", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    measured = sorted(one["step_seconds"] for one in records[2:] if not one["checkpoint"])
    assert found["steps"] == len(measured)
    assert measured[0] <= found["terms"]["step"]["measured"] <= measured[-1]
    assert {"forward_backward", "optimizer", "memory"} <= set(found["terms"])
    assert found["worst"] in found["terms"]
    assert main(["plan", "compare", str(run_dir), "cluster=h100_ib"]) == 0
    assert f"largest difference: {found['worst']}, planned minus measured" in capsys.readouterr().out


def test_incomplete_metric_lines_are_skipped(run_dir, tmp_path, capsys):
    shutil.copytree(run_dir, tmp_path / "run")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 9}\n{"step": 11, "step_seconds": null, "seconds": null}\n{"step": 10, "step_se')
    with (tmp_path / "run/metrics.jsonl").open("ab") as file:
        file.write(b"\n\xec\xff\x00\n")  # as after a power failure
    words = [str(tmp_path / "run"), "cluster=h100_ib", "--json"]
    assert main(["plan", "compare", *words]) == 0
    printed = capsys.readouterr()
    fixed = json.loads(printed.out)["steps"]
    assert "gangline plan compare: note: " in printed.err
    assert "2 lines do not contain a step record" in printed.err
    assert main(["plan", "compare", str(run_dir), *words[1:]]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == fixed
    (tmp_path / "run/metrics.jsonl").write_text("")
    assert main(["plan", "compare", *words]) == 2
    assert "train resume=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"), [([], "takes one run directory"), (["nowhere"], "nowhere")], ids=["none", "no run"]
)
def test_invalid_compare_arguments_are_refused(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "compare", *words, "cluster=h100_ib"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
