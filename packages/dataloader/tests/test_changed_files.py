"""Data files that change or hold invalid tokens during a run: the error gives the file, no wrong data is read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gangline.data.reader import ReadPlace
from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.sources import build
from gangline_dataloader.store import local, npy, watch
from gangline_dataloader.store.fields import add_checksum
from gangline_dataloader.store.manifest import FILE
from gangline_dataloader.store.npy import compute_checksum
from gangline_testkit.runs import build_small_run

SHARD = "shard-00001.npy"


@pytest.fixture
def store(texts, make_store) -> Path:
    folder = make_store(texts, clean=(), shard_tokens=4000, validation=0)
    assert commands.main(["prepare", "--out", str(folder), "--pack", "32"]) == 0
    return folder


def source(path: Path, *words: str):
    run = build_small_run(
        "model.vocab_size=256", "batch.sequence_length=32", "data=tokens", f"data.path={path}", *words
    )
    return build.build_tokens(run.data, run, "train")


def samples(source) -> list[bytes]:
    return [source.sample(i)["tokens"].tobytes() for i in range(source.count_samples())]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def replaced(path: Path) -> None:
    shutil.copy(path.with_name("shard-00002.npy"), path.with_name("other"))
    path.with_name("other").replace(path)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"Z" * 100)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("change", [cut, replaced, overwritten, Path.unlink])
def test_shard_changed_during_run_is_named(store, change, packing, monkeypatch):
    now = source(store, f"data.packing={packing}")
    whole = samples(now)
    change(store / SHARD)
    clock = watch.time.monotonic() + watch.EVERY
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock)
    for _ in range(2):  # the error repeats
        with pytest.raises(UserError, match=rf"{SHARD} has changed since the run began"):
            now.fill(np.arange(4))
    reader = now.open_reader(ReadPlace(0, 1, 4, 4, torch.device("cpu")))
    reader.begin(0, 0)
    with pytest.raises(UserError, match=SHARD):
        reader.take()
    reader.close()
    assert len(whole) == now.count_samples()


def test_shard_changed_during_checksum_is_named(store, monkeypatch):
    """Restore the modification time, so that only the change time of the inode reveals the change."""
    real = local.map_vector

    def mapped(path: Path, *words):
        found, before = real(path, *words), path.stat()
        if path.name == SHARD:
            overwritten(path)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return found

    monkeypatch.setattr(local, "map_vector", mapped)
    with pytest.raises(UserError, match=rf"{SHARD} has changed since the run began"):
        samples(source(store))


READS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
from test_changed_files import SHARD, samples, source
from gangline.errors import UserError
from gangline_dataloader.store import watch
path = Path(sys.argv[2])
now = source(path, f"data.packing={sys.argv[3]}")
whole = samples(now)
os.truncate(path / SHARD, 0)
clock = watch.time.monotonic() + watch.OFTEN
watch.time.monotonic = lambda: clock
try:
    now.fill(np.arange(now.count_samples()))
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("packing", ["concatenate", pytest.param("best_fit", marks=pytest.mark.nightly)])
def test_truncated_shard_is_named_without_sigbus(store, packing):
    """Read in another process, because SIGBUS ends a process that reads beyond a truncated file."""
    command = [sys.executable, "-c", READS, str(Path(__file__).parent), str(store), packing]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, f"ended by {told.returncode}: {told.stderr[-500:]}"
    assert f"{SHARD} has changed since the run began" in told.stdout


def test_rewritten_shard_with_equal_bytes_is_accepted(store, monkeypatch):
    now = source(store)
    whole = samples(now)
    (store / SHARD).write_bytes((store / SHARD).read_bytes())
    clock = watch.time.monotonic() + watch.EVERY
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock)
    assert samples(now) == whole


def test_shard_changed_with_restored_mtime_is_named(store, monkeypatch):
    now = source(store)
    samples(now)
    before = (store / SHARD).stat()
    overwritten(store / SHARD)
    os.utime(store / SHARD, ns=(before.st_atime_ns, before.st_mtime_ns))
    clock = watch.time.monotonic() + watch.EVERY
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock)
    with pytest.raises(UserError, match=rf"{SHARD} has changed since the run began"):
        samples(now)


def test_shard_changed_before_first_read_is_named(store):
    """Write bytes of the same size after the run began: the later time makes the run verify the content."""
    now = source(store)
    overwritten(store / SHARD)
    later = (store / SHARD).stat().st_mtime + 60
    os.utime(store / SHARD, (later, later))
    with pytest.raises(UserError, match=rf"{SHARD} is damaged or was replaced"):
        samples(now)


@pytest.mark.parametrize("whole", [npy.WHOLE, 0])
def test_shard_replaced_before_start_is_named(store, monkeypatch, whole):
    """Replace a shard by a move, which keeps an old time; large shards are verified by samples of their bytes."""
    tokens = np.load(store / SHARD)
    tokens[:] = ord("Z")
    np.save(store / "other.npy", tokens)
    os.utime(store / "other.npy", (1e9, 1e9))
    (store / "other.npy").replace(store / SHARD)
    monkeypatch.setattr(npy, "WHOLE", whole)
    with pytest.raises(UserError, match=rf"{SHARD} is damaged or was replaced"):
        samples(source(store))


def exchanged(path: Path) -> None:
    """Replace a file by another one of the same size that is older than the run."""
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.with_name("other").write_bytes(content)
    os.utime(path.with_name("other"), (1e9, 1e9))
    path.with_name("other").replace(path)


@pytest.mark.parametrize("name", ["shard-00001.ends.npy", "shard-00001.pack-32.npy", "shard-00001.pack-32.rows.npy"])
def test_replaced_ends_or_plan_file_is_named(store, name):
    exchanged(store / name)
    with pytest.raises(UserError, match=rf"{name} is damaged or was replaced"):
        samples(source(store, "data.packing=best_fit" if "pack" in name else "data.document_masking=true"))


@pytest.mark.parametrize("name", [SHARD, "shard-00001.ends.npy"])
def test_append_refuses_replaced_shard(store, name, tmp_path):
    (tmp_path / "more.txt").write_text("What is appended. " * 9)
    exchanged(store / name)
    with pytest.raises(UserError, match=rf"{name} is damaged or was replaced"):
        commands.main(["prepare", str(tmp_path / "more.txt"), "--out", str(store), "--append", "--workers", "1"])


def test_packing_plan_refuses_replaced_document_ends(store):
    exchanged(store / "shard-00001.ends.npy")
    with pytest.raises(UserError, match=r"shard-00001.ends.npy is damaged or was replaced"):
        commands.main(["prepare", "--out", str(store), "--pack", "16"])


def test_large_shard_changed_between_sampled_pieces_is_named(store, monkeypatch):
    """Change a byte outside the sampled pieces: the newer time makes the run compare the complete file."""
    monkeypatch.setattr(npy, "WHOLE", 0)
    monkeypatch.setattr(npy, "PIECE", 8)
    about = json.loads((store / FILE).read_text())
    shards = about["shards"]
    shards["pieces_xxh3"] = [
        npy.compute_sampled_checksum(store / f"shard-{n:05d}.npy") for n in range(len(shards["xxh3"]))
    ]
    (store / FILE).write_text(json.dumps(add_checksum(about)))
    now = source(store)
    content = bytearray((store / SHARD).read_bytes())
    content[200] ^= 1
    (store / SHARD).write_bytes(content)
    later = (store / SHARD).stat().st_mtime + 60
    os.utime(store / SHARD, (later, later))
    with pytest.raises(UserError, match=rf"{SHARD} has changed since the run began"):
        samples(now)


def test_read_error_of_a_large_shard_is_named(store, monkeypatch):
    """Fail the read of the sampled pieces."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(npy, "WHOLE", 0)
    monkeypatch.setattr(npy, "sample", fail)
    with pytest.raises(UserError, match=r"npy cannot be read\.\n.*Input/output error"):
        samples(source(store))


def test_large_shards_without_sampled_checksums_are_read_completely(store, texts, monkeypatch, tmp_path):
    about = json.loads((store / FILE).read_text())
    assert len(about["shards"].pop("pieces_xxh3")) == len(about["shards"]["xxh3"])
    (store / FILE).write_text(json.dumps(add_checksum(about)))
    (tmp_path / "more.txt").write_text("What is appended. " * 9)
    assert (
        commands.main(["prepare", str(tmp_path / "more.txt"), "--out", str(store), "--append", "--clean", "none"]) == 0
    )
    assert json.loads((store / FILE).read_text())["shards"]["pieces_xxh3"] == []
    monkeypatch.setattr(npy, "WHOLE", 0)
    now = source(store)
    assert len(samples(now)) == now.count_samples()
    overwritten(store / SHARD)
    with pytest.raises(UserError, match=rf"{SHARD} is damaged or was replaced"):
        samples(source(store))


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_token_beyond_vocabulary_is_named_when_read(store, packing):
    """Write a store with valid checksums whose manifest records a smaller vocabulary than its tokens need."""
    about = json.loads((store / FILE).read_text())
    path = store / SHARD
    tokens = np.load(path)
    tokens[1234] = 255
    np.save(store / "other.npy", tokens)
    (store / "other.npy").replace(path)
    about["shards"]["xxh3"][1], about["vocab_size"] = compute_checksum(path), 255
    (store / FILE).write_text(json.dumps(add_checksum(about)))
    for plan in store.glob("pack-*.json"):
        plan.unlink()
    assert commands.main(["prepare", "--out", str(store), "--pack", "32"]) == 0
    with pytest.raises(UserError, match="contains token 255, outside its vocabulary of 255"):
        samples(source(store, f"data.packing={packing}"))
