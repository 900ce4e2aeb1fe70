"""Arguments that a launcher receives, and options of launchers whose ranks run on other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.cli import main as gangline
from gangline.cli.train import main as train
from gangline.config.check import check, count_ranks
from gangline.config.defaults import build_default_run
from gangline.plugin import catalogue
from gangline.plugin.registry import installed
from gangline.run.directory import RunDirectory
from gangline_basics.launch import forkserver
from gangline_basics.launch.config import LocalLaunch
from gangline_testkit import as_installed
from gangline_testkit.real_runs import SMALL, write_small_text


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Yield the overrides of a small run with this launcher, in its own directory."""
    monkeypatch.chdir(tmp_path)
    with as_installed("gangline-elsewhere", "launch_elsewhere", path=Path(__file__).parent / "elsewhere"):
        yield ["launch=elsewhere", f"data.path={write_small_text(tmp_path / 'corpus')}", *SMALL]


def elsewhere(**options):
    return installed().find("launch", "elsewhere").part.config(**options)


def test_launcher_receives_locked_run_directory(words, tmp_path, capsys):
    assert train([*words, "run.dir=out"]) == 7
    assert capsys.readouterr().out == "given out\n"
    assert (tmp_path / "out" / "config.yaml").exists()


def test_launcher_refusal_leaves_no_directory(words, tmp_path, capsys):
    assert train([*words, "run.dir=out", "launch.refuse=true"]) == 2
    assert "the queue is closed." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_launcher_receives_all_sweep_runs_at_once(words, tmp_path, capsys):
    assert train(["-m", *words, "run.dir=sweep", "run.seed=1,2,3"]) == 1  # the first exit code that is not 0
    printed = capsys.readouterr().out
    assert printed.startswith("given 00 01 02\n")
    assert "run.seed=3" in printed
    assert [path.name for path in sorted((tmp_path / "sweep").iterdir())] == ["00", "01", "02"]


def test_launcher_refusal_leaves_no_sweep_directory(words, tmp_path, capsys):
    assert train(["-m", *words, "run.dir=sweep", "run.seed=1,2", "launch.refuse=true"]) == 2
    assert train(["-m", *words, "run.dir=sweep", "launch.gpus=1,2"]) == 2
    assert "have different launch.* options" in capsys.readouterr().err
    assert not list((tmp_path / "sweep").glob("*"))


def test_error_after_submit_keeps_run_directory(words, tmp_path, capsys):
    assert train([*words, "run.dir=out", "launch.lose=true"]) == 2
    assert train(["-m", *words, "run.dir=sweep", "run.seed=1,2", "launch.lose=true"]) == 2
    assert "no answer from the queue." in capsys.readouterr().err
    for given in ("out", "sweep/00", "sweep/01"):
        assert (tmp_path / given / "config.yaml").exists()


def test_error_after_submit_keeps_resumed_configuration(words, tmp_path):
    assert train([*words, "run.dir=out", "launch.lose=true"]) == 2
    assert train(["resume=out", "run.steps=77"]) == 2
    assert RunDirectory.open("out").run().steps == 77
    assert train(["resume=out", "run.steps=78", "launch.refuse=true", "launch.lose=false"]) == 2
    assert RunDirectory.open("out").run().steps == 77


def test_fork_server_is_not_started_without_local_ranks(words, monkeypatch):
    monkeypatch.setattr(forkserver, "warm", lambda more=(): pytest.fail("a server was started"))
    assert train([*words, "run.dir=out"]) == 7


def test_machine_without_gpu_may_submit_gpu_run(words, monkeypatch):
    monkeypatch.setattr("gangline.config.check.count_gpus", lambda device=None: 0)
    check(build_default_run(parallel="ddp", launch=elsewhere(), run={"device": "cuda"}))
    with pytest.raises(Exception, match="this machine has no GPU"):
        check(build_default_run(parallel="ddp", launch=LocalLaunch(), run={"device": "cuda"}))


def test_launcher_sets_world_size(words):
    assert count_ranks(build_default_run(parallel="ddp", launch=elsewhere())) == 8
    assert count_ranks(build_default_run(parallel="ddp", launch=elsewhere(processes=4))) == 4


def test_missing_command_names_package_that_supplies_command(monkeypatch, capsys):
    monkeypatch.setattr(catalogue, "VERBS", {"frob": "gangline-moe"})
    assert gangline.main(["frob"]) == 2
    assert f"is supplied by gangline-moe:  {catalogue.get('gangline-moe')}" in capsys.readouterr().err
