"""Cache of downloaded shards: unrelated files are never deleted, and damaged files are never read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from gangline.errors import UserError
from gangline_dataloader.sources import build
from gangline_dataloader.store import watch
from gangline_dataloader.store.manifest import FILE
from gangline_dataloader.store.remote import cache as caches
from gangline_dataloader.store.remote.cache import FOLDER, MARKER, FileCache
from gangline_testkit.runs import build_small_run

CONTENT = {number: bytes([number]) * 500 for number in range(3)}


def opened(cache: FileCache, number: int, *answers: bytes) -> bytes:
    """Return the content of file `number`; each fetch gives the next of `answers`, and then the correct content."""
    content, arriving = CONTENT[number], iter(answers)
    fetch = lambda path: path.write_bytes(next(arriving, content))  # noqa: E731
    with cache.open(f"shard-{number:05d}.npy", 500, xxhash.xxh3_128(content).hexdigest(), fetch) as file:
        return file.read()


def source(store: Path, place: Path, *words: str):
    sizes = ("model.vocab_size=256", "batch.sequence_length=48", "data=tokens")
    run = build_small_run(*sizes, f"data.path={store.as_uri()}", f"data.cache={place}", *words)
    return build.build_tokens(run.data, run, "train")


def test_full_cache_keeps_unrelated_files(texts, make_store, tmp_path):
    """Check files next to the cache folder, and files in it with names that the cache does not use."""
    store = make_store(texts, clean=(), shard_tokens=3000, validation=0)
    place = tmp_path / "precious"
    (place / "folder").mkdir(parents=True)
    (place / "thesis.txt").write_text("my thesis")
    (place / "photos.tar").write_bytes(bytes(100_000))
    (place / f"{'0' * 32}-shard-00000.npy").write_bytes(bytes(100))
    FileCache(place, 1)
    (place / FOLDER / "notes.txt").write_text("mine, too")
    (place / FOLDER / f"{'0' * 32}-shard-00000.npy").symlink_to(place / "thesis.txt")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    read = source(store, place, "data.cache_bytes=9000", "data.shuffle_span=2000")
    for number in range(read.count_samples()):
        read.sample(number)
    assert FileCache(place, 9000).count_bytes() <= 9000
    assert {path: path.read_bytes() for path in before} == before


def test_cache_refuses_unrelated_folder_of_same_name(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "thesis.txt").write_text("my thesis")
    with pytest.raises(UserError, match="is not a cache that gangline created"):
        FileCache(tmp_path, 1000)
    (tmp_path / FOLDER / "thesis.txt").unlink()
    FileCache(tmp_path, 1000)
    assert (tmp_path / FOLDER / MARKER).exists()


def test_damaged_download_is_counted_once_in_cache(tmp_path):
    cache = FileCache(tmp_path, 1000)
    opened(cache, 0)
    assert opened(cache, 1, b"?" * 500) == CONTENT[1]
    assert cache.count_bytes() == 1000


def test_least_recently_used_file_is_evicted(tmp_path):
    cache = FileCache(tmp_path, 1000)
    for number in (0, 1, 0, 2):
        opened(cache, number)
    names = sorted(path.name.partition("-")[2] for path in cache.folder.glob("*.npy"))
    assert names == ["shard-00000.npy", "shard-00002.npy"]


def test_cached_file_with_silent_corruption_is_fetched_again(tmp_path, monkeypatch):
    """Change a cached file but not its name, size and time: each process verifies each file once."""
    cache = FileCache(tmp_path, 1000)
    opened(cache, 0)
    (path,) = cache.folder.glob("*.npy")
    about = path.stat()
    path.write_bytes(b"?" * 500)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    monkeypatch.setattr(caches, "_checked", set())  # as in another process
    assert opened(cache, 0) == CONTENT[0]
    assert path.read_bytes() == CONTENT[0]


def test_overwritten_cached_file_is_fetched_again(tmp_path):
    cache = FileCache(tmp_path, 1000)
    opened(cache, 0)
    (path,) = cache.folder.glob("*.npy")
    path.write_bytes(b"?" * 500)
    os.utime(path, (1, 1))
    assert opened(cache, 0) == CONTENT[0]


@pytest.mark.parametrize("evicted", [False, True])
def test_error_names_cached_file_changed_during_run(texts, make_store, tmp_path, monkeypatch, evicted):
    """Check also an evicted file, which stays mapped and does not count as changed."""
    read = source(make_store(texts, clean=(), shard_tokens=3000, validation=0), tmp_path)
    whole = [read.sample(number)["tokens"].tobytes() for number in range(read.count_samples())]
    for path in (tmp_path / FOLDER).glob("*-shard-00000.npy"):
        with path.open("r+b") as file:
            if evicted:
                path.unlink()
            else:
                file.seek(1000)
                file.write(b"Z" * 100)
    clock = watch.time.monotonic() + watch.EVERY
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock)
    if evicted:
        assert [read.sample(number)["tokens"].tobytes() for number in range(read.count_samples())] == whole
        return
    with pytest.raises(
        UserError,
        match=r"shard-00000.npy has changed since the run began(.|\n)*fetches damaged files of the shard cache again",
    ):
        read.sample(0)


@pytest.mark.parametrize("xxh3", ["../victim/z", "victim/z", "a/b/c", "", "0" * 31, "G" * 32])
@pytest.mark.parametrize("column", ["xxh3", "ends_xxh3"])
def test_manifest_whose_checksum_is_a_path_is_refused(texts, make_store, tmp_path, xxh3, column):
    store = make_store(texts, validation=0)
    about = json.loads((store / FILE).read_text())
    about["shards"][column][0] = xxh3
    (store / FILE).write_text(json.dumps(about))
    with pytest.raises(UserError, match=rf"{column} is .*\n.*checksums of 32 hex digits"):
        source(store, tmp_path / "cache").fill(np.arange(1))


def test_file_removed_during_checksum_is_still_read(tmp_path, monkeypatch):
    """Remove the name between the open and the checksum; the open file stays readable."""
    cache = FileCache(tmp_path, 1000)
    opened(cache, 0)
    caches._checked.clear()
    real = caches._get_version

    def removed(file):
        Path(file.name).unlink(missing_ok=True)
        return real(file)

    monkeypatch.setattr(caches, "_get_version", removed)
    assert opened(cache, 0) == CONTENT[0]
