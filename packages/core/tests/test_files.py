"""Locked files and folders, and files that are replaced atomically."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangline.errors import UserError
from gangline.storage import files
from gangline.storage.files import (
    lock_file,
    lock_folder,
    lock_handle,
    open_lock,
    open_replacement,
    sync_folder,
    write_whole,
)

HOLDER = """
import sys, time
from gangline.storage.files import lock_file
with lock_file(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def no_locks(monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_lock_of_a_killed_process_is_free(tmp_path):
    lock = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), lock_file(lock, seconds=0):
            pass
        holder.send_signal(signal.SIGKILL)
        with lock_file(lock, seconds=30):
            pass
    finally:
        holder.kill()
        holder.wait()


def test_lock_waits_until_timeout(tmp_path):
    with lock_file(tmp_path / "lock"):
        began = time.monotonic()
        with pytest.raises(BlockingIOError), lock_file(tmp_path / "lock", seconds=0.2):
            pass
        assert time.monotonic() - began >= 0.2


def test_shared_lock_admits_shared_holders_only(tmp_path):
    one, two = open_lock(tmp_path / "lock"), open_lock(tmp_path / "lock")
    lock_handle(one)
    lock_handle(one, shared=True)
    lock_handle(two, shared=True, seconds=0)
    with pytest.raises(BlockingIOError):
        lock_handle(two, seconds=0)
    os.close(one)
    lock_handle(two, seconds=0)
    os.close(two)


def test_folder_lock_is_exclusive(tmp_path):
    with lock_folder(tmp_path), pytest.raises(BlockingIOError), lock_folder(tmp_path, seconds=0):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("lock", [lock_file, lock_folder])
def test_lock_follows_no_link(tmp_path, lock):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder" if lock is lock_folder else "file")
    with pytest.raises(OSError, match="link"), lock(tmp_path / "link"):
        pass
    assert names(tmp_path) == ["folder", "link"]


def test_lock_file_refuses_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(UserError, match="is a named pipe"), lock_file(tmp_path / "lock"):
        pass


@pytest.mark.usefixtures("no_locks")
def test_file_system_without_locks_fails_required_lock(tmp_path):
    with pytest.raises(OSError, match="No locks"), lock_file(tmp_path / "lock"):
        pass
    with lock_file(tmp_path / "lock", required=False), lock_folder(tmp_path, required=False):
        pass


def test_optional_lock_still_excludes_other_holders(tmp_path):
    with (
        lock_file(tmp_path / "lock"),
        pytest.raises(BlockingIOError),
        lock_file(tmp_path / "lock", seconds=0, required=False),
    ):
        pass


@pytest.mark.parametrize("content", ["text é\n", b"bytes"])
def test_write_whole_replaces_a_file(tmp_path, content):
    (tmp_path / "a").write_text("an older and longer content")
    write_whole(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert names(tmp_path) == ["a"]


def test_write_whole_sets_the_permissions(tmp_path):
    write_whole(tmp_path / "a", "secret", mode=0o600)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_write_whole_replaces_a_link(tmp_path):
    (tmp_path / "thesis").write_text("mine")
    (tmp_path / "a").symlink_to("thesis")
    write_whole(tmp_path / "a", "new")
    assert (tmp_path / "thesis").read_text() == "mine"
    assert not (tmp_path / "a").is_symlink()


def test_write_whole_without_replace_keeps_existing_file(tmp_path):
    write_whole(tmp_path / "a", "first", replace=False)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a", "second", replace=False)
    assert (tmp_path / "a").read_text() == "first"
    assert names(tmp_path) == ["a"]


def test_write_whole_on_full_disk_keeps_old_file(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]
    write_whole(tmp_path / "a", "new", durable=False)
    assert (tmp_path / "a").read_text() == "new"


def test_temporary_name_of_a_killed_writer_is_reused(tmp_path):
    (tmp_path / ".a.part").write_text("half of an older con")
    with open_replacement(tmp_path / "a", temporary=".a.part") as file:
        file.write(b"new")
        file.flush()
        assert (tmp_path / ".a.part").read_bytes() == b"new"
        assert not (tmp_path / "a").exists()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_sync_folder_ignores_einval_and_raises_io_errors(tmp_path, monkeypatch, number):
    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", fsync)
    if number == errno.EINVAL:
        sync_folder(tmp_path)
    else:
        with pytest.raises(OSError, match="Input/output error"):
            sync_folder(tmp_path)
