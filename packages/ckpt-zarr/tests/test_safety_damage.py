"""Flipped, truncated, missing and misplaced chunks: each is detected, reported and never loaded."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from made import composed

from gangline.checkpoint.base import SaveRequest
from gangline.checkpoint.id import CheckpointId
from gangline.errors import BadCheckpoint
from gangline.mesh import Mesh
from gangline_ckpt_zarr.checkpointer import ZarrCheckpointer, build
from gangline_ckpt_zarr.format.checksum import TRAILER, compute_seal, compute_seal_start
from gangline_ckpt_zarr.format.chunks import ChunkRun
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_testkit import checkpointer_ranks as kit

ROWS = 1030  # rows of the large arrays, a little over 1 MiB each, so that they start at page boundaries


@dataclass(frozen=True)
class Made:
    """A run with two checkpoints of one layout; `opened` builds a new checkpointer for it."""

    run_dir: Path

    def opened(self) -> ZarrCheckpointer:
        run = composed(self.run_dir)
        return build(run.checkpoint, run, None)

    def place(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / str(CheckpointId(step))

    def outcome(self, step: int = 2) -> BadCheckpoint | None:
        """Load a checkpoint and return the damage that the load reports; without damage, check the loaded values."""
        checkpointer = self.opened()
        shards = kit.make_shards(registry(), None)
        try:
            checkpointer.load(CheckpointId(step), shards, registry())
        except BadCheckpoint as bad:
            return bad
        finally:
            checkpointer.close()
        assert kit.find_wrong(shards, step) == []
        return None


def registry():
    return kit.build_registry(Mesh.of({}), ROWS)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    found = Made(tmp_path_factory.mktemp("run"))
    checkpointer = found.opened()
    for step in (1, 2):
        shards = kit.make_shards(registry(), step)
        checkpointer.save(SaveRequest(step), shards, registry(), kit.make_document(step, 1, step)).settled.result()
    checkpointer.close()
    return found


@pytest.fixture
def chunks(made: Made) -> Iterator[list[tuple[ChunkRun, int, Path]]]:
    """Yield (run, number, file) of every chunk of step 2, and restore the file afterwards."""
    checkpointer = made.opened()
    (_, meta), *_ = checkpointer.read_metas(CheckpointId(2))
    path = made.place(2) / meta.get_file_path(0)
    content = path.read_bytes()
    yield [(run, number, path) for run in meta.files.get_rank_file(0).runs for number in range(run.count)]
    path.write_bytes(content)


@contextmanager
def patched(path: Path, at: int, content: bytes) -> Iterator[None]:
    """Replace bytes of a file within this context."""
    with path.open("r+b", buffering=0) as file:
        before = os.pread(file.fileno(), len(content), at)
        os.pwrite(file.fileno(), content, at)
        yield
        os.pwrite(file.fileno(), before, at)


def other(made: Made) -> bytes:
    """Return the content of the same file of step 1."""
    (path,) = made.place(1).glob("data-*/00000.bin")
    return path.read_bytes()


def is_named(bad: BadCheckpoint | None, run: ChunkRun, number: int, path: Path) -> bool:
    box = run.chunk_box(number)
    limits = tuple((at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
    return bad is not None and (bad.array, bad.box, bad.file) == (run.name, limits, str(path))


def test_undamaged_checkpoint_loads(made: Made) -> None:
    assert made.outcome(1) is made.outcome(2) is None


def test_bit_flip_in_any_chunk_is_named(made: Made, chunks) -> None:
    draw, content = random.Random(1), chunks[0][2].read_bytes()
    for run, number, path in chunks:
        at = run.base + number * run.stride + draw.randrange(run.nbytes + TRAILER)
        with patched(path, at, bytes([content[at] ^ 1 << draw.randrange(8)])):
            assert is_named(made.outcome(), run, number, path), (run.name, number)


def test_truncation_in_any_chunk_is_named(made: Made, chunks) -> None:
    draw = random.Random(2)
    for run, number, path in reversed(chunks):
        os.truncate(path, run.base + number * run.stride + draw.randrange(run.nbytes + TRAILER))
        assert is_named(made.outcome(), run, number, path), (run.name, number)


def test_missing_file_is_named(made: Made, chunks) -> None:
    path = chunks[0][2]
    path.rename(path.with_suffix(".gone"))
    bad = made.outcome()
    path.with_suffix(".gone").rename(path)
    assert is_named(bad, chunks[0][0], 0, path)


@pytest.mark.parametrize("behind", [TRAILER - 4, TRAILER], ids=["what zarr knows of", "all of it"])
def test_chunk_of_another_step_is_named(made: Made, chunks, behind: int) -> None:
    """Copy a chunk of another step with its valid checksum, with and without its seal: the seal reveals the copy."""
    elsewhere, here = other(made), chunks[0][2].read_bytes()
    for run, number, path in chunks:
        start = run.base + number * run.stride
        part = slice(start, start + run.nbytes + behind)
        assert elsewhere[part] != here[part]
        with patched(path, start, elsewhere[part]):
            bad = made.outcome()
        assert is_named(bad, run, number, path), (run.name, number)
        assert "another save" in str(bad)


def test_load_error_names_file_from_another_step(made: Made, chunks) -> None:
    run, number, path = chunks[0]
    path.write_bytes(other(made))
    assert is_named(made.outcome(), run, number, path)


def test_swapped_chunks_are_named(made: Made, chunks) -> None:
    """Swap adjacent chunks of equal size, of one array or of two arrays; all checksums stay valid."""
    swapped, content = 0, chunks[0][2].read_bytes()
    for (one, first, path), (two, second, _) in pairwise(chunks):
        if one.nbytes != two.nbytes:
            continue
        a, b = one.base + first * one.stride, two.base + second * two.stride
        length = one.nbytes + TRAILER
        with patched(path, a, content[b : b + length]), patched(path, b, content[a : a + length]):
            assert is_named(made.outcome(), one, first, path)
        swapped += 1
    assert swapped >= 3


def test_renamed_checkpoint_is_refused(made: Made, chunks, tmp_path: Path) -> None:
    """Copy a complete checkpoint, zarr.json and data file, to the directory of another step."""
    copy = made.place(3)
    copy.mkdir()
    try:
        for path in (made.place(2) / NAME, chunks[0][2]):
            target = copy / path.relative_to(made.place(2))
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
        bad = made.outcome(3)
        assert bad is not None
        assert str(copy / NAME) in str(bad)
    finally:
        for path in sorted(copy.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        copy.rmdir()


def test_zarr_json_from_another_step_is_refused(made: Made, chunks) -> None:
    path = made.place(2) / NAME
    content = path.read_bytes()
    path.write_bytes((made.place(1) / NAME).read_bytes())
    bad = made.outcome()
    path.write_bytes(content)
    assert bad is not None


IDS = st.integers(0, (1 << 32) - 1).map("{:08x}".format)
WORD = st.integers(0, (1 << 32) - 1)


@given(IDS, IDS, WORD, WORD, WORD)
def test_seals_of_different_saves_differ(one: str, two: str, number: int, checksum: int, another: int) -> None:
    """Check seals that differ in one input: a 32-bit CRC maps each 32 bits of its input one to one."""
    sealed = compute_seal(compute_seal_start(one, "model/w", (0, 8)), number, checksum)
    assert (sealed == compute_seal(compute_seal_start(two, "model/w", (0, 8)), number, checksum)) == (one == two)
    assert (sealed == compute_seal(compute_seal_start(one, "model/w", (0, 8)), number, another)) == (
        checksum == another
    )
    assert (sealed == compute_seal(compute_seal_start(one, "model/w", (0, 8)), another, checksum)) == (
        number == another
    )


def test_load_without_verification_detects_only_missing_data(made: Made, chunks) -> None:
    """Set checkpoint.verify=false: flipped bits are loaded, and only missing bytes are an error."""
    run, _, path = chunks[0]
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    checkpointer = made.opened()
    checkpointer.config.verify = False
    shards = kit.make_shards(registry(), None)
    checkpointer.load(CheckpointId(2), shards, registry())
    assert kit.find_wrong(shards, 2) == ["model/embed.weight at (0, 0)"]
    path.write_bytes(content[: run.base + 1])
    with pytest.raises(BadCheckpoint):
        checkpointer.load(CheckpointId(2), shards, registry())
    assert torch.isfinite(shards[0].local.flatten()[0])
