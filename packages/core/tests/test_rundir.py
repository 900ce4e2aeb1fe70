"""Run directories: atomic creation, one `train` at a time, provenance, no secrets."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from gangline.config.defaults import build_default_run
from gangline.config.serial import to_dict
from gangline.errors import UserError
from gangline.run import provenance
from gangline.run.directory import RunDirectory, make_fresh
from gangline.storage.files import write_whole


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory.create(
        build_default_run(run={"dir": str(tmp_path / "out"), "steps": 5}), ["train", "run.steps=5"]
    )
    yield made
    made.unlock()


def test_run_directory_describes_the_run(directory):
    assert yaml.safe_load(directory.config.read_text())["run"]["steps"] == 5
    parts = json.loads(directory.parts.read_text())
    assert parts["model"] == {"part": "tiny", "distribution": "gangline-basics", "version": parts["model"]["version"]}
    assert [part["part"] for part in parts["track"]] == ["console", "jsonl", "tensorboard"]
    [start] = directory.read_provenance()["starts"]
    assert start["command"] == ["train", "run.steps=5"]
    assert start["versions"]["torch"].startswith("2.")
    assert directory.logs.is_dir()
    assert directory.checkpoints.is_dir()


def test_source_identity_changes_with_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    names = set()
    for path in ("alone_one.py", "folder_one/__init__.py", "folder_one/deep/part.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        for content in ("a = 1\n", "a = 2\n"):
            (tmp_path / path).write_text(content)
            importlib.invalidate_caches()
            names.add(provenance.identify_source(".".join(Path(path).with_suffix("").parts)))
    assert len(names) == 6
    assert "" not in names
    assert provenance.identify_source("not_installed.part") == ""


def test_moved_run_reads_its_new_directory(directory, tmp_path):
    moved = tmp_path / "moved"
    directory.path.rename(moved)
    run = RunDirectory.open(moved).run()
    assert run.job.dir == str(moved)
    run.job.dir = str(tmp_path / "out")
    assert to_dict(run) == yaml.safe_load((moved / "config.yaml").read_text())


def test_relative_data_paths_are_written_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CURVES", "curves")
    run = build_default_run(run={"dir": "out"})
    run.data.path = ["texts", "more/*.md", "~/notes", "s3://bucket/x", "/abs/../text"]
    run.data.tokenizer = "tokenizer.json"
    run.track["jsonl"].path = "metrics/all.jsonl"
    run.track["tensorboard"].path = "curves"
    run.references["track.tensorboard.path"] = "${oc.env:CURVES}"
    RunDirectory.create(run).unlock()
    assert run.data.tokenizer == "tokenizer.json"
    content = RunDirectory.open("out").read_content()
    here = str(tmp_path)
    assert content["data"]["path"] == [f"{here}/texts", f"{here}/more/*.md", "~/notes", "s3://bucket/x", "/text"]
    assert content["data"]["tokenizer"] == f"{here}/tokenizer.json"
    assert content["track"]["jsonl"]["path"] == f"{here}/metrics/all.jsonl"
    assert content["track"]["tensorboard"]["path"] == "${oc.env:CURVES}"
    assert content["run"]["dir"] == "out"
    assert content["model"]["weights"] is None


def test_unset_directory_stays_unset_in_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = RunDirectory.create(build_default_run(run={"name": "a b/c"}))
    assert made.path.parent.name == "runs"
    assert made.path.name.endswith("-a-b-c")
    assert made.read_content()["run"]["dir"] is None
    made.unlock()
    other = RunDirectory.create(build_default_run(run={"name": "a b/c"}))
    assert other.path != made.path
    other.unlock()


def test_runs_started_in_same_second_get_different_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = make_fresh("x")
    first.mkdir(parents=True)
    assert make_fresh("x") != first


@pytest.mark.parametrize("content", ["", "run: {steps: 5}\n", "parts: {model"])
def test_a_half_written_configuration_is_refused(directory, content):
    directory.config.write_text(content)
    with pytest.raises(UserError, match=r"is truncated: its last line must be '\.\.\.'"):
        RunDirectory.open(directory.path)


def test_every_truncated_configuration_is_refused(directory):
    text = directory.config.read_text()
    for length in range(0, len(text) - 1, 37):
        directory.config.write_text(text[:length])
        with pytest.raises(UserError):
            RunDirectory.open(directory.path)


def test_a_directory_without_a_configuration_is_refused(directory):
    directory.config.unlink()
    with pytest.raises(UserError, match=r"is not a complete run directory: config\.yaml is missing"):
        RunDirectory.open(directory.path)


def test_missing_directory_lists_neighbouring_runs(directory):
    with pytest.raises(UserError, match=f"Runs in {directory.path.parent}: {directory.path}"):
        RunDirectory.open(directory.path.with_name("outt"))


def test_missing_directory_lists_runs_of_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.yaml").touch()
    with pytest.raises(UserError, match="Runs in runs: runs/one"):
        RunDirectory.open("last")


def test_directory_with_run_is_not_reused(directory):
    directory.unlock()
    with pytest.raises(UserError, match="already holds a run") as caught:
        RunDirectory.create(build_default_run(run={"dir": str(directory.path)}))
    assert f"train resume={directory.path}" in str(caught.value)
    assert f"train from={directory.path}" in str(caught.value)


def test_unwritable_directory_is_refused():
    code = (
        "import os, sys\n"
        "from gangline.run.directory import RunDirectory\nfrom gangline.config.defaults import build_default_run\n"
        "run = build_default_run(run={'dir': sys.argv[1]})\n"
        "if os.geteuid() == 0: os.setegid(65534); os.seteuid(65534)\n"  # root ignores read-only permissions
        "RunDirectory.create(run)"
    )
    with tempfile.TemporaryDirectory() as name:
        closed = Path(name)
        closed.chmod(0o555)
        for target in (closed, closed / "deeper"):
            done = subprocess.run(
                [sys.executable, "-c", code, str(target)], capture_output=True, text=True, timeout=240
            )
            assert f"cannot write the run directory {target}: Permission denied." in done.stderr


def test_file_in_place_of_directory_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="cannot write the run directory"):
        RunDirectory.create(build_default_run(run={"dir": str(tmp_path / "out")}))


HOLD = """
import sys, time
from gangline.run.directory import RunDirectory
directory = RunDirectory.open(sys.argv[1])
directory.lock()
print("held", flush=True)
time.sleep(60)
"""


def test_locked_directory_refuses_second_process(directory):
    directory.unlock()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(directory.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"is in use by another train command: pid {holder.pid} on "):
            RunDirectory.open(directory.path).lock()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        again = RunDirectory.open(directory.path)
        again.lock()  # the lock of a killed process is free
        again.unlock()
    finally:
        holder.kill()
        holder.wait()


UNLOCKED = """
import errno, fcntl, sys
from gangline.run.directory import RunDirectory

def flock(handle, how):  # as on a file system that has none
    raise OSError(errno.ENOLCK, "No locks available")

fcntl.flock = flock
for _ in range(2):
    RunDirectory.open(sys.argv[1]).lock()
"""


def test_file_system_without_locks_is_noted_once(directory):
    done = subprocess.run([sys.executable, "-c", UNLOCKED, str(directory.path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("without locks") == 1


def test_second_creator_of_directory_is_refused(directory):
    with pytest.raises(UserError, match="is in use"):
        RunDirectory.create(build_default_run(run={"dir": str(directory.path)}))


def test_kill_while_writing_leaves_complete_file(tmp_path):
    target = tmp_path / "config.yaml"
    old, new = "old\n" * 20000, "new\n" * 20000
    code = (
        "import sys; from pathlib import Path; from gangline.storage.files import write_whole\n"
        "print('go', flush=True)\nfor _ in range(100000): write_whole(Path(sys.argv[1]), 'new\\n' * 20000)"
    )
    for number in range(6):
        target.write_text(old)
        writer = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "go\n"
        time.sleep(0.002 * number)
        writer.kill()
        writer.wait()
        assert target.read_text() in (old, new)


def test_failed_write_leaves_no_temporary_file(tmp_path):
    with pytest.raises(TypeError):
        write_whole(tmp_path / "a", 5)
    assert list(tmp_path.iterdir()) == []


def test_provenance_facts_are_added(directory):
    directory.add_provenance("data", {"fingerprint": "abc"})
    facts = RunDirectory.open(directory.path).read_provenance()
    assert facts["data"] == {"fingerprint": "abc"}
    assert len(facts["starts"]) == 1


def test_resume_adds_start_with_changed_options(directory):
    run = directory.run()
    run.job.steps = 9
    directory.rewrite(run, ["train", "resume=out"], {"run.steps": [5, 9]})
    assert directory.read_content()["run"]["steps"] == 9
    starts = directory.read_provenance()["starts"]
    assert [start["changed"] for start in starts] == [{}, {"run.steps": [5, 9]}]


def test_refused_resume_restores_configuration(directory):
    run, before = directory.run(), directory.config.read_text()
    run.job.steps = 9
    directory.rewrite(run)
    directory.put_back()
    assert directory.config.read_text() == before
    directory.rewrite(run)
    directory.attempts.write_text('{"attempt": 1, "start": null}\n')
    directory.put_back()
    assert directory.read_content()["run"]["steps"] == 9


def test_changed_part_versions_are_reported(directory):
    parts = json.loads(directory.parts.read_text())
    version = parts["optimizer"]["version"]
    parts["optimizer"]["version"] = "0.0.1"
    directory.parts.write_text(json.dumps(parts))
    basics = "gangline-basics"
    (said,) = directory.list_changed_parts()
    assert said == f"optimizer=adamw: {basics} 0.0.1 when the run began, {basics} {version} now"


# --- provenance ---


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words], cwd=folder, check=True)


def test_provenance_records_commit_and_dirty_state(tmp_path):
    assert provenance.read_git(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    clean = provenance.read_git(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "file").write_text("two")
    assert provenance.read_git(tmp_path) == {**clean, "dirty": True}


def test_environment_variables_are_not_written_to_run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "sh-very-secret")
    made = RunDirectory.create(build_default_run(run={"dir": str(tmp_path / "out")}), ["train"])
    made.unlock()
    for path in made.path.rglob("*"):
        if path.is_file():
            assert "sh-very-secret" not in path.read_text()


def test_a_run_that_was_refused_leaves_no_directory(tmp_path):
    run = build_default_run(run={"dir": str(tmp_path / "runs" / "new")})
    RunDirectory.create(run).discard()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "mine").mkdir()
    kept = RunDirectory.create(build_default_run(run={"dir": str(tmp_path / "mine")}))
    kept.discard()  # the user has created the directory
    assert kept.config.exists()
    begun = RunDirectory.create(run)
    begun.add_provenance("data", {})
    begun.discard()
    assert begun.config.exists()
    begun.unlock()
    kept.unlock()


def test_failed_creation_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("gangline.run.directory.find_part_versions", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        RunDirectory.create(build_default_run(run={"dir": str(tmp_path / "runs" / "new")}))
    assert not (tmp_path / "runs").exists()


def test_hints_quote_a_directory_with_a_space(tmp_path):
    run = build_default_run(run={"dir": str(tmp_path / "a b;c")})
    RunDirectory.create(run).unlock()
    with pytest.raises(UserError, match="already holds a run") as caught:
        RunDirectory.create(run)
    assert f"train resume='{tmp_path / 'a b;c'}'" in str(caught.value)
