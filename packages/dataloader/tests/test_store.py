"""Token store: windows, document ends, identity, and errors of files that contradict the manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.store.fields import add_checksum
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.manifest import FILE, Manifest, Shards, Tokenizer, read
from gangline_dataloader.store.write import ShardWriter


def written(folder: Path, documents: list[list[np.ndarray]]) -> Manifest:
    """Write a store with one shard for each list of documents."""
    folder.mkdir(exist_ok=True)
    shards = Shards()
    for number, some in enumerate(documents):
        writer = ShardWriter(folder, number, "<u2")
        writer.write(some)
        shards.append(writer.close())
    manifest = Manifest("<u2", 1000, Tokenizer("bytes", "bytes"), shards)
    manifest.write(folder)
    return manifest


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_windows_and_ends_match_concatenated_shards(data, tmp_path):
    """Check any shards, including a window that spans three shards."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    lengths = data.draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=5))
    documents = [[rng.integers(0, 1000, n) for n in some] for some in lengths]
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    written(tmp_path / "store", documents)
    store, whole = LocalTokens(tmp_path / "store"), np.concatenate([one for some in documents for one in some])
    assert store.total == len(whole)
    length = data.draw(st.integers(1, len(whole)))
    starts = rng.integers(0, len(whole) - length + 1, 7)
    out = np.empty((7, length), store.dtype)
    store.copy_windows(starts, length, out)
    assert np.array_equal(out, np.stack([whole[start : start + length] for start in starts]))
    ends = np.cumsum([n for some in lengths for n in some])
    start = int(starts[0])
    assert store.find_document_ends(start, start + length).tolist() == [e for e in ends if start < e <= start + length]


def test_shards_are_plain_numpy_files(tmp_path):
    written(tmp_path, [[np.arange(5), np.arange(3)]])
    assert np.load(tmp_path / "shard-00000.npy", mmap_mode="r").tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert np.load(tmp_path / "shard-00000.ends.npy").tolist() == [5, 8]


def test_grown_store_matches_identity_before_growth(tmp_path):
    documents = [[np.arange(1, 9)], [np.arange(4)], [np.arange(7)]]
    short, long = written(tmp_path / "short", documents[:2]), written(tmp_path / "long", documents)
    assert long.match_prefix(short.compute_identity()) == 2
    assert short.match_prefix(long.compute_identity()) is None
    assert (
        long.compute_identity()
        != short.compute_identity()
        != written(tmp_path / "other", documents[1:]).compute_identity()
    )


DAMAGE = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0\0"),
    "missing": lambda path: path.unlink(),
    "another array": lambda path: path.write_bytes(path.read_bytes().replace(b"<u", b"<i", 1)),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["shard-00001.npy", "shard-00001.ends.npy"])
def test_error_names_file_that_contradicts_manifest(kind, name, tmp_path, capsys):
    written(tmp_path, [[np.arange(50)], [np.arange(60), np.arange(9)]])
    DAMAGE[kind](tmp_path / name)
    store = LocalTokens(tmp_path)
    read_it = store.shard_ends if "ends" in name else store.shard
    with pytest.raises(UserError, match=name) as error:
        read_it(1)
    assert "gangline data verify" in str(error.value)
    assert commands.main(["verify", str(tmp_path)]) == 1
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("name", ["shard-00000.npy", "shard-00000.ends.npy"])
def test_verify_finds_a_flipped_bit(name, tmp_path, capsys):
    written(tmp_path, [[np.arange(50), np.arange(10)]])
    assert commands.main(["verify", str(tmp_path)]) == 0
    content = bytearray((tmp_path / name).read_bytes())
    content[-3] ^= 16
    (tmp_path / name).write_bytes(content)
    capsys.readouterr()
    assert commands.main(["verify", str(tmp_path)]) == 1
    assert name in capsys.readouterr().out


LIES = {
    "format": "something",
    "version": 2,
    "dtype": "<f4",
    "vocab_size": 1 << 20,
    "tokenizer": [],
    "shards": {"tokens": [5], "documents": [6], "xxh3": ["0" * 32], "ends_xxh3": ["0" * 32]},
}


@pytest.mark.parametrize("field", LIES)
def test_manifest_with_invalid_field_is_refused(field, tmp_path):
    written(tmp_path, [[np.arange(50)]])
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**content, field: LIES[field]}))
    with pytest.raises(UserError, match=field if field != "shards" else "documents"):
        read(tmp_path)


@pytest.mark.parametrize("column", ["pieces_xxh3", "loss_xxh3"])
def test_manifest_with_too_few_optional_checksums_is_refused(column, tmp_path):
    written(tmp_path, [[np.arange(50)], [np.arange(9)]])
    content = json.loads((tmp_path / FILE).read_text())
    content["shards"][column] = ["0" * 32]
    (tmp_path / FILE).write_text(json.dumps(add_checksum(content)))
    with pytest.raises(UserError, match=f"{column} is .*\n.*Expected one checksum for each shard, or an empty list"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"null", b"[" * 100_000, b'{"format": 1}', b"\xff"])
def test_malformed_manifest_is_refused(content, tmp_path):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError, match=FILE):
        read(tmp_path)


def test_folder_without_manifest_is_refused(tmp_path):
    with pytest.raises(UserError, match="gangline data prepare"):
        read(tmp_path)
