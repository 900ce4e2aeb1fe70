"""A run directory that somebody else made, or wrote to: a run in it writes to no file outside."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline import attempts, generation
from gangline.attempts import Attempt
from gangline.errors import UserError
from gangline.events import Events
from gangline.launch import output
from gangline.run_files import refuse_planted
from gangline.rundir import RunDirectory
from gangline.track.base import Start
from gangline.track.jsonl import JsonLinesTracker

SOMEBODY, OTHER = 61001, 61002
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users are made by root alone")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return made_in(tmp_path)


@pytest.fixture
def shared_run_dir() -> Iterator[Path]:
    """A run directory that other users can reach: pytest keeps its own folders from them."""
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
            with pytest.raises(UserError, match=f"{place} is a symbolic link to .*, out of the run directory"):
                hold()
        (run_dir / place).unlink()
    assert (run_dir.parent / "thesis.txt").read_text() == "my thesis"


def test_links_of_the_user_within_a_run_directory_are_kept(run_dir):
    """Checkpoints on another disk, a tracker's link to its newest run, data beside the run."""
    shutil.rmtree(run_dir / "checkpoints")
    for name in ("checkpoints", "data"):
        (run_dir.parent / f"of-{name}").mkdir()
        (run_dir / name).symlink_to(run_dir.parent / f"of-{name}")
    (run_dir / "wandb" / "run-1").mkdir(parents=True)
    (run_dir / "wandb" / "latest-run").symlink_to("run-1")
    directory = RunDirectory(run_dir)
    directory.lock()
    directory.unlock()


def test_links_that_appear_later_are_not_followed(run_dir):
    """By somebody who can write there while the run goes on."""
    writers = {
        "events.jsonl": lambda: Events(run_dir),
        "attempts.jsonl": lambda: attempts.append(run_dir, Attempt(1, None)),
        ".generation": lambda: generation.advance(run_dir),
        "metrics.jsonl": lambda: JsonLinesTracker(None).begin(Start("run", str(run_dir), 0, 1, 1, 1, 1)),
        "logs/rank-00001.log": lambda: output.divert(run_dir / "logs", 1),
    }
    for name, write in writers.items():
        (run_dir / name).symlink_to(run_dir.parent / "thesis.txt")
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            write()
    assert (run_dir.parent / "thesis.txt").read_text() == "my thesis"


def refused(user: int, run_dir: Path) -> str:
    """Return what this user is told of the directory; "" where it may be used."""
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
    assert f"{run_dir} belongs to user {OTHER}, who can choose what a run in it reads" in refused(SOMEBODY, run_dir)
    assert refused(OTHER, run_dir) == ""
    assert refused(0, run_dir) == ""


@as_root
def test_files_of_other_users_in_a_shared_run_directory_are_refused(shared_run_dir):
    run_dir = shared_run_dir
    run_dir.chmod(0o755)
    os.chown(run_dir, SOMEBODY, -1)
    os.chown(run_dir / "config.yaml", OTHER, -1)
    assert refused(SOMEBODY, run_dir) == "", "nobody else can have put it there"
    run_dir.chmod(0o775)
    assert f"config.yaml belongs to user {OTHER}" in refused(SOMEBODY, run_dir)
    os.chown(run_dir / "config.yaml", SOMEBODY, -1)
    assert refused(SOMEBODY, run_dir) == ""
