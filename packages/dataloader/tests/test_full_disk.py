"""`gangline data prepare` on a full or read-only disk, and the same command after the disk is fixed."""

from __future__ import annotations

import os
import random
import resource
import subprocess
from pathlib import Path

import pytest

from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.commands import prepare as command
from gangline_dataloader.prepare import run
from gangline_dataloader.prepare.settings import Settings


@pytest.fixture
def small_disk(tmp_path):
    """Yield a disk of 400 kB and the maximum size of a file there (None: the disk sets the limit)."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if os.geteuid() == 0 and subprocess.run(mount).returncode == 0:
        yield disk, None
        subprocess.run(["umount", str(disk)], check=True)
    else:
        yield disk, 60_000


@pytest.fixture
def numbers(tmp_path) -> Path:
    """Return a folder with two files of 80 kB."""
    (tmp_path / "numbers").mkdir()
    draw = random.Random(0)
    for name in "ab":
        text = " ".join(str(draw.random()) for _ in range(4200))
        (tmp_path / "numbers" / f"{name}.txt").write_text(text[:80_000])
    return tmp_path / "numbers"


def prepare(folder: Path, out: Path, workers: int = 1) -> None:
    run.prepare([str(folder)], out, Settings(task_bytes=1000, validation=0), workers, lambda *progress: None)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_full_disk_is_reported_and_next_prepare_continues(small_disk, numbers, tmp_path):
    disk, limit = small_disk
    filler, before = disk / "filler", resource.getrlimit(resource.RLIMIT_FSIZE)
    filler.write_bytes(bytes(220_000 if limit is None else 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit or before[0], before[1]))
    try:
        with pytest.raises(UserError, match=f"{disk}/store cannot be written: (No space|File too large)") as full:
            prepare(numbers, disk / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "Finished tasks of the preparation remain on disk." in str(full.value)
    assert "type the same command" in str(full.value)
    work = disk / "store" / run.WORK
    kept = (work / "task-000000.json").stat().st_ino if limit is None else None
    filler.write_bytes(b"")
    seen = []

    def progress(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("task", total):
            seen.append((list(work.glob(".*.part")), (work / "task-000000.json").stat().st_ino))

    run.prepare([str(numbers)], disk / "store", Settings(task_bytes=1000, validation=0), 1, progress)
    assert seen[0][0] == [], "files that were not complete keep no room"
    assert kept in (None, seen[0][1])
    prepare(numbers, tmp_path / "other")
    assert contents(disk / "store") == contents(tmp_path / "other")


def test_full_disk_during_packing_is_named(small_disk, numbers, monkeypatch):
    disk, limit = small_disk
    prepare(numbers, disk / "store")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(command, "format_report", lambda *words: "")
    if limit is None:
        with pytest.raises(OSError, match="No space"):
            (disk / "filler").write_bytes(bytes(1 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit and 1000, before[1]) if limit else before)
    try:
        with pytest.raises(UserError, match=f"{disk}/store cannot be written"):
            commands.main(["prepare", "--out", str(disk / "store"), "--pack", "16"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", [".", "deep/store"])
def test_read_only_folder_is_named(small_disk, numbers, name):
    disk, limit = small_disk
    if limit is None:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    else:
        disk.chmod(0o555)
    try:
        with pytest.raises(UserError, match=r"cannot be written: (Read-only file system|Permission denied)") as closed:
            prepare(numbers, disk / name)
        assert str(disk / name) in str(closed.value)
    finally:
        disk.chmod(0o755) if limit else None


def test_permission_error_of_another_file_is_unchanged(tmp_path):
    from gangline_dataloader.store.durable import explain_write_errors

    with pytest.raises(PermissionError), explain_write_errors(tmp_path / "store"):
        raise PermissionError(13, "Permission denied", str(tmp_path / "input.txt"))
