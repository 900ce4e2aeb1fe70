"""`gangline plan calibrate`: a machine as a cluster file that plans are made with."""

from __future__ import annotations

import json

import pytest

from gangline.cli.main import main
from gangline.cluster import load_cluster
from gangline_planner.calibrate.lines import intercept_and_slope
from gangline_planner.calibrate.links import link


def test_a_line_is_found_again():
    start, slope = intercept_and_slope([(x, 3e-5 + 2e-9 * x) for x in (1e3, 1e5, 1e7)])
    assert start == pytest.approx(3e-5)
    assert slope == pytest.approx(2e-9)
    assert intercept_and_slope([(1.0, 2.0), (4.0, 2.0)]) == (0.0, 0.5)  # no more for more


def test_links_of_known_latency_and_bandwidth_are_found_again():
    """Of four ranks an all-reduce takes four rounds, an all-gather two."""
    measured = {
        name: [(size, rounds * 1e-5 + size / 1e9) for size in (4e3, 4e5, 4e7)]
        for name, rounds in (("all_reduce", 4), ("all_gather", 2))
    }
    found = link(measured, 4)
    assert found["bandwidth"] == pytest.approx(1e9)
    assert found["latency"] == pytest.approx(1e-5)


@pytest.mark.waits
def test_two_processes_measure_this_machine_and_a_plan_takes_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "calibrate", "--out", "here.yaml", "--processes", "2"]) == 0
    found = load_cluster(str(tmp_path / "here.yaml"))
    assert found.topology.gpus_per_node == 2
    assert found["peak.fp32"] > 1e8
    assert found["link.node.bandwidth"] > 1e6
    assert "measured by gangline plan calibrate" in found.numbers["memory.bandwidth"].source
    assert found.numbers["jitter.sigma"].source == "assumed"
    capsys.readouterr()
    words = "parallel=ddp launch.processes=2 batch.global_size=16 cluster=here.yaml --json"
    assert main(["plan", *words.split()]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--processes 2", "gangline plan calibrate writes one file."),
        ("--out here.txt", "gangline plan calibrate writes one file."),
        ("--out here.yaml --processes 1.5", "--processes 1.5: expected a whole number."),
        ("--out nowhere/here.yaml", "nowhere is no directory."),
        ("--out there.yaml", "there.yaml is there already."),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").touch()
    assert main(["plan", "calibrate", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
