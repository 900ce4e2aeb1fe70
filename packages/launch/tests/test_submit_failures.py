"""Failed submits on Kubernetes and Slurm: the run directory of a job that may exist is not deleted.

A script stands in for kubectl.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from gangline import UserError
from gangline.cli.train import main as train
from gangline.run.ending import RunEnding, write_ending
from gangline_launch import commands, follow, job as jobs
from gangline_launch.kubernetes import launcher, levels, scheduler
from gangline_launch.slurm import requeues
from gangline_launch.state import SchedulerError

KUBECTL = """#!{python}
import json, pathlib, sys, time
import yaml

here = pathlib.Path({here!r})
words = sys.argv[1:]
with (here / "asked").open("a") as file:
    file.write(" ".join(words) + "\\n")
sets = json.loads((here / "sets").read_text())
answers = json.loads((here / words[0]).read_text()) if (here / words[0]).exists() else []
answer = answers.pop(0) if answers else ""
(here / words[0]).write_text(json.dumps(answers))
if answer == "hang":
    time.sleep(60)
if answer.startswith("no:"):
    sys.exit(answer[3:])
if words[0] == "apply":
    for each in yaml.safe_load_all(open(words[2])):
        if each["kind"] == "JobSet":
            sets.setdefault(each["metadata"]["name"], each)
if words[:2] == ["get", "nodes"]:
    print(answer)
elif words[0] == "get" and words[2] in sets:
    status = dict(conditions=[dict(type=answer, status="True")]) if answer else {{}}
    print(json.dumps({{**sets[words[2]], "status": status}}))
if words[0] == "delete":
    key, _, mark = words[words.index("--selector") + 1].partition("=")
    sets = {{name: each for name, each in sets.items() if each["metadata"]["labels"][key] != mark}}
(here / "sets").write_text(json.dumps(sets))
if answer == "late":
    sys.exit("error: timed out waiting for the answer")
"""


class Cluster:
    """State of the stand-in for kubectl; `says` sets its next answers to a verb, and otherwise kubectl succeeds."""

    def __init__(self, here: Path) -> None:
        self.here = here
        (here / "sets").write_text("{}")
        (here / "kubectl").write_text(KUBECTL.format(python=sys.executable, here=str(here)))
        (here / "kubectl").chmod(0o755)

    def says(self, verb: str, *answers: str) -> None:
        (self.here / verb).write_text(json.dumps(answers))

    def names(self) -> list[str]:
        return list(json.loads((self.here / "sets").read_text()))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(follow, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.01)
    return Cluster(tmp_path / "bin")


@pytest.fixture
def words(tmp_path):
    own = ["recipe=tiny", "parallel=ddp", "launch=kubernetes", "launch.nodes=2", "launch.image=x"]
    return [*own, f"launch.volume=runs:{tmp_path}"]


def test_failed_query_is_retried_and_keeps_run_directory(cluster, words, tmp_path, capsys):
    cluster.says("get", "no:Unable to connect to the server", "no:the server is busy", "", "Failed")
    assert train([*words, f"run.dir={tmp_path}/one"]) == 1
    assert "Unable to connect" in capsys.readouterr().err
    assert (tmp_path / "one" / "config.yaml").exists()
    assert jobs.require_job(tmp_path / "one").id.endswith(cluster.names()[0])


def test_kubectl_timeout_is_a_scheduler_error(cluster, monkeypatch):
    monkeypatch.setattr(scheduler, "SECONDS", 0.1)
    cluster.says("get", "hang")
    with pytest.raises(SchedulerError, match="no answer for"):
        scheduler.KubernetesScheduler().get_state(jobs.SubmittedJob.create("kubernetes", "default/one", mark="m"))


def test_answer_without_job_set_is_scheduler_error():
    assert scheduler.read("") is None
    with pytest.raises(SchedulerError, match="which is not a JobSet"):
        scheduler.read("<html>gateway</html>")


def test_refused_run_directory_is_removed_after_job_ends(cluster, words, tmp_path, monkeypatch):
    def refused(*_, **__):
        raise UserError("the ranks refuse it.")

    monkeypatch.setattr("gangline_launch.kubernetes.launcher.follow", refused)
    cluster.says("get", "no:Unable to connect to the server")
    assert train([*words, f"run.dir={tmp_path}/unknown"]) == 2
    cluster.says("get", "")
    assert train([*words, f"run.dir={tmp_path}/lives"]) == 2
    cluster.says("get", "Failed")
    assert train([*words, f"run.dir={tmp_path}/over"]) == 2
    assert [(tmp_path / name).exists() for name in ("unknown", "lives", "over")] == [True, True, False]


@pytest.mark.parametrize(("state", "kept"), [("RUNNING", True), ("FAILED", False)])
def test_refused_slurm_run_directory_is_removed_after_job(tmp_path, monkeypatch, state, kept):
    def refused(*_, **__):
        raise UserError("no word from the job.")

    monkeypatch.setattr("gangline_launch.slurm.launcher.follow", refused)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, says in {"sbatch": "7", "scontrol": f"JobId=7 JobState={state} Reason=None"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\necho {says}\n")
        (tmp_path / name).chmod(0o755)
    words = ["recipe=tiny", "parallel=ddp", "launch=slurm", "launch.nodes=2", "launch.shared=[/]", "run.device=cpu"]
    monkeypatch.setattr("gangline_launch.storage.find_local_paths", lambda *_: iter(()))
    assert train([*words, f"run.dir={tmp_path}/one"]) == 2
    assert (tmp_path / "one" / "config.yaml").exists() == kept


@pytest.mark.parametrize(
    ("apply", "get", "kept"),
    [
        ("no:Error from server (Forbidden)", "", False),
        ("no:Unable to connect to the server", "no:Unable to connect to the server", True),
        ("late", "", True),
    ],
)
def test_failed_submit_keeps_directory_of_possible_job(cluster, words, tmp_path, apply, get, kept, capsys):
    cluster.says("apply", apply)
    cluster.says("get", get)
    assert train([*words, f"run.dir={tmp_path}/one"]) == 2
    assert ("accepted the job is unknown" in capsys.readouterr().err) == kept
    assert (tmp_path / "one").exists() == kept


def test_resubmit_creates_new_job_without_old_ending(cluster, words, tmp_path):
    run_dir = tmp_path / "00"
    cluster.says("get", "Completed")
    train([*words, f"run.dir={run_dir}"])
    write_ending(run_dir, RunEnding(generation=1, reason="done", exit_code=0))
    cluster.says("get", "Completed", "Completed")
    assert train([f"resume={run_dir}", "run.steps=99"]) == 1  # no rank has run, so there is no new ending
    first, second = cluster.names()
    assert first != second
    assert jobs.require_job(run_dir).id == f"default/{second}"


def test_submit_does_not_write_through_a_link(cluster, words, tmp_path):
    run_dir = tmp_path / "00"
    cluster.says("get", "Completed")
    train([*words, f"run.dir={run_dir}"])
    planted = run_dir / jobs.FOLDER / launcher.FILE
    planted.unlink()
    planted.symlink_to("../track.txt")
    (run_dir / "track.txt").write_text("mine")
    cluster.says("get", "Completed", "Completed")
    train([f"resume={run_dir}", "run.steps=99"])
    assert len(cluster.names()) == 2
    assert (run_dir / "track.txt").read_text() == "mine"


def test_cancel_deletes_only_job_of_run(cluster, words, tmp_path):
    for sweep in ("a", "b"):
        (tmp_path / sweep).mkdir()
        cluster.says("get", "Failed")
        assert train([*words, f"run.dir={tmp_path}/{sweep}/00"]) == 1
    second = cluster.names()[1]
    assert commands.main(["cancel", str(tmp_path / "a" / "00")]) == 0
    assert cluster.names() == [second]
    other = jobs.require_job(tmp_path / "b" / "00")  # a job of another submit with the same name
    jobs.write_job(tmp_path / "b" / "00", jobs.SubmittedJob.create("kubernetes", other.id, mark="another"))
    assert scheduler.KubernetesScheduler().get_state(jobs.require_job(tmp_path / "b" / "00")).phase == "gone"
    scheduler.KubernetesScheduler().cancel(jobs.require_job(tmp_path / "b" / "00"))
    assert cluster.names() == [second]


@pytest.mark.parametrize(
    ("scheduler", "id"), [("slurm", "--user=alice"), ("slurm", "7_1"), ("slurm", "٧"), ("kubernetes", "default/--all")]
)
def test_malformed_job_id_is_refused(tmp_path, scheduler, id):
    """Refuse an id from another user's file, which could otherwise set options of scancel or kubectl."""
    (tmp_path / "launch").mkdir()
    content = {"scheduler": scheduler, "id": id, "submitted": 0.0, "mark": "m"}
    (tmp_path / "launch" / "job.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a job id of"):
        commands.main(["cancel", str(tmp_path)])


def test_job_without_submit_mark_is_not_deleted(cluster):
    with pytest.raises(SchedulerError, match="submit label of job default/one is missing"):
        scheduler.KubernetesScheduler().cancel(jobs.SubmittedJob.create("kubernetes", "default/one"))
    assert not (cluster.here / "asked").exists()


def test_node_labels_are_read_before_submit(cluster, words, tmp_path, capsys):
    nodes = {"items": [{"metadata": {"name": f"n{number}", "labels": {"rack": f"r{number}"}}} for number in range(2)]}
    cluster.says("get", json.dumps(nodes), "Failed")
    assert train([*words, f"run.dir={tmp_path}/one", "launch.levels=[rack]"]) == 1
    assert levels.read_places(tmp_path / "one") == {"n0": "r0.n0", "n1": "r1.n1"}
    for answer, said in (
        ("no:Forbidden", "kubectl cannot read the labels"),
        (json.dumps(nodes), "all nodes lack this label"),
    ):
        cluster.says("get", answer)
        assert train([*words, f"run.dir={tmp_path}/two", "launch.levels=[row]"]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "two").exists()
    assert len(cluster.names()) == 1


def test_second_job_is_refused_even_if_state_unknown(cluster, words, tmp_path, capsys):
    cluster.says("get", "Failed")
    train([*words, f"run.dir={tmp_path}/one"])
    cluster.says("get", "")
    assert train([f"resume={tmp_path}/one"]) == 2
    assert "has a job already" in capsys.readouterr().err
    cluster.says("get", "no:Unable to connect")
    with pytest.raises(UserError, match="may have a job already"):
        launcher.refuse_second(tmp_path / "one")
    assert len(cluster.names()) == 1


@pytest.mark.parametrize(("name", "read"), [(jobs.FILE, jobs.read_job), (requeues.FILE, requeues.read)])
def test_named_pipe_in_launch_folder_is_refused(tmp_path, name, read):
    os.mkfifo(jobs.make_launch_folder(tmp_path) / name)
    with pytest.raises(UserError, match=f"{name} is a named pipe, not a regular file"):
        read(tmp_path)
