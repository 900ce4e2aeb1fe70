"""Run directories created or changed by others: a run writes to no file outside its directory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.errors import UserError
from gangline.record import StepRecord, read_records
from gangline.run import attempts, generation
from gangline.run.attempts import Attempt
from gangline.run.directory import RunDirectory
from gangline.run.ending import read_ending
from gangline.run.events import Events, read_events
from gangline.run.files import refuse_planted
from gangline.track import Start
from gangline_basics.launch import rank_log
from gangline_basics.runs.run_figure import write_run_figure
from gangline_basics.track.jsonl import JsonLinesTracker

SOMEBODY, OTHER = 61001, 61002
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users are made by root alone")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return made_in(tmp_path)


@pytest.fixture
def shared_run_dir() -> Iterator[Path]:
    """Yield a run directory that other users can reach, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield made_in(Path(folder))


def made_in(tmp_path: Path) -> Path:
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints").mkdir()
    (tmp_path / "out" / "config.yaml").write_text("run: {}\n...\n")
    (tmp_path / "thesis.txt").write_text("my thesis")
    return tmp_path / "out"


def test_links_out_of_the_run_directory_are_refused(run_dir):
    for place in (".lock", "events.jsonl", "logs/rank-00000.log", ".meeting"):
        target = run_dir.parent / ("thesis.txt" if "." in place[1:] or place == ".lock" else "")
        (run_dir / place).symlink_to(target)
        for hold in (RunDirectory(run_dir).lock, RunDirectory(run_dir).share):
            with pytest.raises(UserError, match=f"{place} is a symbolic link to .*, outside of the run directory"):
                hold()
        (run_dir / place).unlink()
    assert (run_dir.parent / "thesis.txt").read_text() == "my thesis"


def test_user_links_in_run_directory_are_allowed(run_dir):
    """Link checkpoints and data to other folders, and a tracker's newest run to a folder of the run directory."""
    shutil.rmtree(run_dir / "checkpoints")
    for name in ("checkpoints", "data"):
        (run_dir.parent / f"of-{name}").mkdir()
        (run_dir / name).symlink_to(run_dir.parent / f"of-{name}")
    (run_dir / "wandb" / "run-1").mkdir(parents=True)
    (run_dir / "wandb" / "latest-run").symlink_to("run-1")
    directory = RunDirectory(run_dir)
    directory.lock()
    directory.unlock()


def test_symbolic_links_created_during_run_are_not_followed(run_dir):
    """Create the links after the directory was checked, as another user with write access could."""
    for name, write in WRITERS.items():
        (run_dir / name).symlink_to(run_dir.parent / "thesis.txt")
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            write(run_dir)
    assert (run_dir.parent / "thesis.txt").read_text() == "my thesis"


READERS = {
    "config.yaml": RunDirectory.open,
    "provenance.json": lambda run_dir: RunDirectory(run_dir).read_provenance(),
    "parts.json": lambda run_dir: RunDirectory(run_dir).list_changed_parts(),
    "attempts.jsonl": attempts.read,
    "events.jsonl": read_events,
    "ending.json": read_ending,
    "metrics.jsonl": lambda run_dir: read_records(run_dir / "metrics.jsonl"),
    ".generation": generation.read_progress,
    ".step": generation.read_most_steps,
}


def draw(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(StepRecord(1, 1, 3.0, 0.5, 1e-3, 100, 1.0, None, time=1.0, step_seconds=1.0).to_json() + "\n")
    try:
        write_run_figure(run_dir)
    finally:
        metrics.unlink()


WRITERS = {
    "loss.svg": draw,
    "events.jsonl": Events,
    "attempts.jsonl": lambda run_dir: attempts.append(run_dir, Attempt(1, None)),
    ".generation": generation.advance,
    "metrics.jsonl": lambda run_dir: JsonLinesTracker(None).begin(Start("run", str(run_dir), 0, 1, 1, 1, 1)),
    "logs/rank-00001.log": lambda run_dir: rank_log.divert(run_dir / "logs", 1),
}


@pytest.mark.parametrize("name", READERS)
def test_readers_refuse_a_pipe_and_a_device(run_dir, name):
    place = run_dir / name
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    with pytest.raises(UserError, match=f"{place} is a named pipe, not a regular file.*\n.*\n.*mv {place} ELSEWHERE"):
        READERS[name](run_dir)
    place.unlink()
    place.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{place} is a device, not a regular file"):
        READERS[name](run_dir)


@pytest.mark.parametrize("name", WRITERS)
def test_writers_refuse_a_pipe(run_dir, name):
    """Create a pipe without a check of the directory, as if the pipe had appeared after that check."""
    os.mkfifo(run_dir / name)
    with pytest.raises(UserError, match=f"{run_dir / name} is a named pipe, not a regular file"):
        WRITERS[name](run_dir)


def test_file_beyond_size_limit_is_not_read(run_dir):
    for name, read in READERS.items():
        with (run_dir / name).open("wb") as file:
            file.truncate(1 << 42)
        with pytest.raises(UserError, match=rf"{run_dir / name} has 4,398,046,511,104 bytes; a run writes at most"):
            read(run_dir)


@pytest.mark.parametrize("name", [".lock", "own-file", "logs/rank-00000.log"])
def test_lock_refuses_run_directory_with_named_pipe(run_dir, name):
    os.mkfifo(run_dir / name)
    for hold in (RunDirectory(run_dir).lock, RunDirectory(run_dir).share):
        with pytest.raises(UserError, match=f"{run_dir / name} is a named pipe"):
            hold()


def refused(user: int, run_dir: Path) -> str:
    """Return the error that this user gets for the directory, or "" if the user may use it."""
    os.seteuid(user)
    try:
        refuse_planted(run_dir)
    except UserError as error:
        return str(error)
    finally:
        os.seteuid(0)
    return ""


@as_root
def test_run_directory_of_another_user_is_refused(shared_run_dir):
    run_dir = shared_run_dir
    for path in (run_dir, *run_dir.iterdir()):
        path.chmod(0o777)
    os.chown(run_dir, OTHER, -1)
    assert f"{run_dir} belongs to user {OTHER}, who can control what a run in this directory reads" in refused(
        SOMEBODY, run_dir
    )
    assert refused(OTHER, run_dir) == ""
    assert refused(0, run_dir) == ""


@as_root
def test_files_of_other_users_are_refused(shared_run_dir):
    run_dir = shared_run_dir
    run_dir.chmod(0o755)
    os.chown(run_dir, SOMEBODY, -1)
    os.chown(run_dir / "config.yaml", OTHER, -1)
    assert refused(SOMEBODY, run_dir) == "", "nobody else can have put it there"
    run_dir.chmod(0o775)
    assert f"config.yaml belongs to user {OTHER}" in refused(SOMEBODY, run_dir)
    os.chown(run_dir / "config.yaml", SOMEBODY, -1)
    assert refused(SOMEBODY, run_dir) == ""
