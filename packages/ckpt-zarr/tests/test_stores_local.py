"""Local store: reads, listing, atomic commits, synced writes, and errors that give the path."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from gangline_ckpt_zarr.stores import direct
from gangline_ckpt_zarr.stores.local import LocalStore

PAGE = 4096


def aligned(content: bytes) -> memoryview:
    """Copy bytes to memory that starts at a page boundary."""
    memory = mmap.mmap(-1, max(len(content), 1))
    memory[: len(content)] = content
    return memoryview(memory)[: len(content)]


def put(store: LocalStore, path: str, content: memoryview, block: int = 4 * PAGE) -> None:
    writer = store.create(path, len(content))
    for first in range(0, len(content), block):
        writer.write(content[first : first + block])
    writer.close()


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 9 * PAGE, 9 * PAGE + 100])
def test_written_bytes_are_read_back(tmp_path: Path, size: int) -> None:
    store, content = LocalStore(tmp_path / "not/yet"), os.urandom(size)
    put(store, "a/b.bin", aligned(content))
    assert store.read("a/b.bin") == content
    assert store.size("a/b.bin") == size


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_pipe_and_device_are_not_read(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    store = LocalStore(tmp_path)
    plant(tmp_path / "a")
    with pytest.raises(OSError, match=f"not a regular file: '{tmp_path / 'a'}'"):
        store.read("a")
    with pytest.raises(OSError, match=f"not a regular file: '{tmp_path / 'a'}'"):
        store.read_into("a", [(0, [memoryview(bytearray(10))])])


def test_write_works_without_direct_io(tmp_path: Path) -> None:
    content = os.urandom(9 * PAGE)
    crooked = aligned(b"x" + content)[1:]
    put(LocalStore(tmp_path), "a", crooked)
    assert (tmp_path / "a").read_bytes() == content
    with tempfile.TemporaryDirectory(dir="/dev/shm") as tmpfs:  # many versions of tmpfs refuse O_DIRECT
        put(LocalStore(tmpfs), "a", aligned(content))
        assert Path(tmpfs, "a").read_bytes() == content


def test_direct_writes_bypass_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    original = os.pwrite

    def pwrite(file: int, content: memoryview, offset: int) -> int:
        seen.append(bool(direct.fcntl.fcntl(file, direct.fcntl.F_GETFL) & os.O_DIRECT))
        return original(file, content, offset)

    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        assert put(LocalStore(tmp_path), "a", aligned(bytes(PAGE))) is None
        return
    monkeypatch.setattr(os, "pwrite", pwrite)
    put(LocalStore(tmp_path), "a", aligned(bytes(2 * PAGE + 5)), block=PAGE)
    assert seen == [True, True, False]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, original = os.urandom(5 * PAGE), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, view, offset: original(file, bytes(view[:1000]), offset))
    put(LocalStore(tmp_path), "a", aligned(content))
    assert (tmp_path / "a").read_bytes() == content


def test_create_and_commit_sync_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    original = os.fsync

    def fsync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        original(file)

    monkeypatch.setattr(os, "fsync", fsync)
    store = LocalStore(tmp_path / "root")
    put(store, "step/data/0.bin", aligned(bytes(PAGE)))
    file = synced.index(str(tmp_path / "root/step/data/0.bin"))
    for place in ("root/step/data", "root/step", "root"):
        assert str(tmp_path / place) in synced[file:]
    assert str(tmp_path) in synced  # the parent has the directory entry of the root
    synced.clear()
    store.commit("step/zarr.json", b"{}")
    assert Path(synced[0]).name.startswith(".unfinished-")
    assert synced[1:] == [str(tmp_path / "root/step"), str(tmp_path / "root")]


def test_create_and_commit_refuse_existing_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put(store, "a", aligned(b"first"))
    with pytest.raises(FileExistsError, match="/a'"):
        store.create("a", 3)
    store.commit("c", b"first")
    with pytest.raises(FileExistsError, match="/c'"):
        store.commit("c", b"second")
    assert (store.read("a"), store.read("c")) == (b"first", b"first")
    assert sorted(os.listdir(tmp_path)) == ["a", "c"]  # the refused calls leave no other file


def test_failed_commit_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)

    def fsync(file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="Input/output"):
            store.commit("zarr.json", b"{}")
    assert store.walk() == []
    assert os.listdir(tmp_path) == []


def test_remains_of_killed_commit_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-zarr.json-12").write_bytes(b"{")
    store = LocalStore(tmp_path)
    assert (store.names(), store.walk()) == ([], [])
    store.delete("")
    assert not tmp_path.exists()


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_create_beyond_file_size_limit_leaves_no_file(tmp_path: Path) -> None:
    with largest_file(100 * PAGE), pytest.raises(OSError, match=r"File too large: '.*/a'"):
        LocalStore(tmp_path).create("a", 101 * PAGE)
    assert os.listdir(tmp_path) == []


def test_create_beyond_file_system_size_leaves_no_file(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as tmpfs:
        size = os.statvfs(tmpfs).f_blocks * os.statvfs(tmpfs).f_frsize
        with pytest.raises(OSError, match=r"No space left on device: '.*/a'"):
            LocalStore(tmpfs).create("a", size + PAGE)
        assert os.listdir(tmpfs) == []


def test_write_failing_midway_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a file system that cannot allocate space.
    monkeypatch.setattr(direct, "_allocate", lambda file, size, place: None)
    writer = LocalStore(tmp_path).create("a", 3 * PAGE)
    writer.write(aligned(bytes(PAGE)))
    with largest_file(PAGE), pytest.raises(OSError, match=r"File too large: '.*/a'"):
        writer.write(aligned(bytes(2 * PAGE)))
    writer.abort()
    assert os.listdir(tmp_path) == []


@contextmanager
def nobody() -> Iterator[None]:
    """Run as the user nobody instead of root, because root ignores permissions."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_unwritable_directory_raises_permission_error() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o555)
        with nobody():
            store = LocalStore(place)
            for act in (lambda: store.create("a", 1), lambda: store.create("b/a", 1), lambda: store.commit("a", b"")):
                with pytest.raises(PermissionError, match=place):
                    act()
        os.chmod(place, 0o755)


def test_writer_with_too_few_bytes_leaves_no_file(tmp_path: Path) -> None:
    writer = LocalStore(tmp_path).create("a", 2 * PAGE)
    writer.write(aligned(bytes(PAGE)))
    with pytest.raises(ValueError, match="bytes were written instead of"):
        writer.close()
    assert os.listdir(tmp_path) == []


@settings(deadline=None)
@given(st.data())
def test_read_into_fills_any_ranges_and_buffers(data: st.DataObject) -> None:
    content = os.urandom(10_000)
    with tempfile.TemporaryDirectory() as place:
        Path(place, "a").write_bytes(content)
        wanted = []
        for offset in data.draw(st.lists(st.integers(0, 5000), max_size=4)):
            sizes = data.draw(st.lists(st.integers(0, 1500), max_size=3))
            wanted.append((offset, [memoryview(bytearray(size)) for size in sizes]))
        LocalStore(place).read_into("a", wanted)
        for offset, buffers in wanted:
            got = b"".join(buffers)
            assert got == content[offset : offset + len(got)]


def test_read_into_handles_many_buffers_and_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(3 * 2500)
    (tmp_path / "a").write_bytes(content)
    buffers = [memoryview(bytearray(3)) for _ in range(2500)]
    LocalStore(tmp_path).read_into("a", [(0, buffers)])
    assert b"".join(buffers) == content
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: original(file, [views[0][:2]], offset))
    again = [memoryview(bytearray(5)) for _ in range(20)]
    LocalStore(tmp_path).read_into("a", [(7, again)])
    assert b"".join(again) == content[7:107]


def test_read_into_accepts_buffers_of_any_type(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(64)))
    words = memoryview(bytearray(32)).cast("I", (2, 4))
    LocalStore(tmp_path).read_into("a", [(8, [words])])
    assert words.tobytes() == bytes(range(8, 40))


def test_read_beyond_end_or_missing_file_raises(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    store = LocalStore(tmp_path)
    for offset in (95, 100, 5000):
        with pytest.raises(EOFError, match="a ends at"):
            store.read_into("a", [(0, [memoryview(bytearray(5))]), (offset, [memoryview(bytearray(10))])])
    with pytest.raises(FileNotFoundError):
        store.read_into("b", [(0, [memoryview(bytearray(5))])])
    with pytest.raises(FileNotFoundError):
        store.read("b")


def test_listing_methods_return_stored_paths(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put(store, "step-1/data/0.bin", aligned(b"0"))
    store.commit("step-1/zarr.json", b"{}")
    put(store, "step-2/data/0.bin", aligned(b"0"))
    assert store.names() == ["step-1", "step-2"]
    assert store.names("step-1") == ["data", "zarr.json"]
    assert store.names("nowhere") == store.names("step-1/zarr.json") == []
    assert store.list_holders("zarr.json") == ["step-1"]
    assert store.walk("step-1") == ["step-1/data/0.bin", "step-1/zarr.json"]
    assert store.walk("nowhere") == []
    assert not store.exists("step-1")
    assert store.exists("step-1/zarr.json")
    with pytest.raises(FileNotFoundError):
        store.size("nowhere")


def test_delete_removes_file_written_during_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a file during the deletion, as a stopped rank that resumes does in a save that has failed meanwhile."""
    store, late = LocalStore(tmp_path / "store"), tmp_path / "store" / "step" / "c" / "late"
    late.parent.mkdir(parents=True)
    rmdir, left = Path.rmdir, 3

    def slow(place: Path) -> None:
        nonlocal left
        if place == late.parent and left:
            left -= 1
            late.write_bytes(b"late")
        rmdir(place)

    monkeypatch.setattr(Path, "rmdir", slow)
    store.delete("step")
    assert not left
    assert not (tmp_path / "store" / "step").exists()


def test_delete_removes_metadata_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    for step in ("step-1", "step-2"):
        put(store, f"{step}/data/0.bin", aligned(b"0"))
        store.commit(f"{step}/zarr.json", b"{}")
    original = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".bin":
            raise OSError(5, "Input/output error")
        original(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(OSError, match="Input/output"):
            store.delete("")
    assert store.walk() == ["step-1/data/0.bin", "step-2/data/0.bin"]
    store.commit("step-2/zarr.json", b"{}")
    there: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            "gangline_ckpt_zarr.stores.local.sync_folder",
            lambda place: there.append(store.exists("step-2/data/0.bin")),
        )
        store.delete("step-2")
    assert there[0]  # the deletion of the metadata is synced before any other file is deleted
    store.delete("step-1/data/0.bin")
    store.delete("step-2")
    store.delete("step-2")
    assert store.walk() == []
    assert store.names() == [], "no empty directory is left behind"
