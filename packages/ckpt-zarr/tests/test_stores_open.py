"""Store URLs, stores supported by fsspec, retried and permanent errors, merged range requests."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings, strategies as st

from gangline.errors import UserError
from gangline_ckpt_zarr.stores.base import ObjectStore, StoreError
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_ckpt_zarr.stores.open import open_store
from gangline_ckpt_zarr.stores.ranges import GAP, LONGEST, plan_fetches
from gangline_ckpt_zarr.stores.remote import FsspecStore
from gangline_ckpt_zarr.stores.retry import retry_request


def test_paths_and_file_urls_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (str(tmp_path / "a"), f"file://{tmp_path}/a", "a", "./a", "~/a"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.local
        assert store.url == str(tmp_path / "a")


def test_missing_fsspec_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = sys.modules["fsspec.registry"]._registry  # `fsspec.registry` is a read-only view of this dict
    for scheme in ("s3", "s3a"):
        monkeypatch.delitem(known, scheme, raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)  # makes `import s3fs` fail
    with pytest.raises(UserError, match="pip install s3fs"):
        open_store("s3://bucket/runs")


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(UserError, match="nonsense://"):
        open_store("nonsense://bucket")


@pytest.fixture
def store() -> ObjectStore:
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    found = open_store("memory://runs/one")
    assert isinstance(found, FsspecStore)
    return found


def test_fsspec_store_supports_all_operations(store: ObjectStore) -> None:
    writer = store.create("step-1/data/0.bin", 10)
    writer.write(memoryview(b"01234"))
    writer.write(memoryview(b"56789"))
    writer.close()
    store.commit("step-1/zarr.json", b"{}")
    with pytest.raises(FileExistsError):
        store.commit("step-1/zarr.json", b"{}")
    with pytest.raises(FileExistsError):
        store.create("step-1/data/0.bin", 10)
    buffers = [memoryview(bytearray(2)), memoryview(bytearray(3))]
    store.read_into("step-1/data/0.bin", [(4, buffers), (1, [memoryview(bytearray(0))])])
    assert b"".join(buffers) == b"45678"
    with pytest.raises(EOFError, match="runs/one/step-1"):
        store.read_into("step-1/data/0.bin", [(8, buffers)])
    assert store.size("step-1/data/0.bin") == 10
    assert store.names() == store.list_holders("zarr.json") == ["step-1"]
    assert store.names("nowhere") == store.walk("nowhere") == []
    assert store.walk() == ["step-1/data/0.bin", "step-1/zarr.json"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        store.read("nowhere")
    store.delete("step-1")
    store.delete("step-1")
    assert store.walk() == []


def test_incomplete_stream_leaves_no_object(store: ObjectStore) -> None:
    writer = store.create("a", 10)
    writer.write(memoryview(b"01234"))
    with pytest.raises(ValueError, match="bytes were written instead of"):
        writer.close()
    assert store.walk() == []


def test_commit_with_lost_answer_succeeds(store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    original, lost = store._fs.pipe_file, [True]

    def pipe_file(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if lost and lost.pop():
            raise ConnectionResetError("the answer is lost")

    monkeypatch.setattr(store._fs, "pipe_file", pipe_file)
    store.commit("zarr.json", b"mine")
    with pytest.raises(FileExistsError):
        store.commit("zarr.json", b"mine")


def test_commit_without_conditional_put_does_not_overwrite(store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the mode of conditional writes, as an emulator of Google Cloud Storage does."""
    original = store._fs.pipe_file
    monkeypatch.setattr(store._fs, "pipe_file", lambda path, content, mode: original(path, content))
    store.commit("zarr.json", b"mine")
    with pytest.raises(FileExistsError):
        store.commit("zarr.json", b"another's")
    assert store.read("zarr.json") == b"mine"


def test_a_password_in_the_url_is_not_shown() -> None:
    store = object.__new__(FsspecStore)
    store.url = "ftp://someone:secret@host/place"
    assert store._format_url("a") == "ftp://host/place/a"


def test_request_timeout_names_path_and_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(left: float) -> None:
        raise ConnectionResetError("gone")

    monkeypatch.setattr("gangline.storage.retry.FIRST_SECONDS", 0.001)
    with pytest.raises(
        StoreError, match=r"s3://b/a: no success within 0.01 s \(\d+ tries\); last error: gone"
    ) as caught:
        retry_request(act, "s3://b/a", 0.01)
    assert caught.value.errno == errno.ETIMEDOUT
    assert isinstance(caught.value.__cause__, ConnectionResetError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(FileNotFoundError(2, "none"), FileNotFoundError), (EOFError("ends"), EOFError), (ValueError("odd"), StoreError)],
)
def test_permanent_request_error_names_path(error: Exception, kind: type[Exception]) -> None:
    def act(left: float) -> None:
        raise error

    with pytest.raises(kind, match="s3://b/a: "):
        retry_request(act, "s3://b/a", 100)


CONTENT = memoryview(bytes(range(251)) * (5 * LONGEST // 251))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * LONGEST), st.lists(st.integers(0, 2 * GAP), max_size=3)), max_size=6))
def test_planned_fetches_cover_all_ranges(wanted: list[tuple[int, list[int]]]) -> None:
    ranges = [(offset, [memoryview(bytearray(size)) for size in sizes]) for offset, sizes in wanted]
    for fetch in plan_fetches(ranges):
        assert fetch.stop - fetch.start <= LONGEST
        fetch.fill(CONTENT[fetch.start : fetch.stop])
    for offset, buffers in ranges:
        got = b"".join(buffers)
        assert got == CONTENT[offset : offset + len(got)]


def test_fetches_merge_neighbors_and_split_long_ranges() -> None:
    small = [(offset, [memoryview(bytearray(100))]) for offset in (0, 100, 100 + GAP, 1 << 40)]
    assert [(fetch.start, fetch.stop) for fetch in plan_fetches(small)] == [(0, 200 + GAP), (1 << 40, (1 << 40) + 100)]
    assert [fetch.stop for fetch in plan_fetches([(0, [memoryview(bytearray(2 * LONGEST + 1))])])] == [
        LONGEST,
        2 * LONGEST,
        2 * LONGEST + 1,
    ]
