"""Chunk shapes, file offsets, owners and overlaps of the checkpoint format, compared with plain enumeration.

The layouts are invented.
"""

from __future__ import annotations

import json
from itertools import product
from math import gcd, prod

import pytest
from hypothesis import given, settings, strategies as st
from layouts import registries

from gangline.errors import BadCheckpoint
from gangline.mesh import Mesh
from gangline.shard import Box, Division, Layout, Registry
from gangline_ckpt_zarr.format import cuts, overlap, packed, zarr_json
from gangline_ckpt_zarr.format.checksum import TRAILER
from gangline_ckpt_zarr.format.chunk_shape import CHUNK_BYTES, LARGE, chunk_shape, compute_spacing
from gangline_ckpt_zarr.format.chunks import PAGE
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_ckpt_zarr.format.references import build_references, chunk_key

MANY = settings(max_examples=150, deadline=None)


@MANY
@given(registries())
def test_shard_boundaries_align_with_chunks(registry: Registry) -> None:
    for name, layout in registry.layouts.items():
        for step, side, length, positions in zip(
            compute_spacing(layout), chunk_shape(layout), layout.shape, layout.list_boundaries(), strict=True
        ):
            assert step == gcd(*(position for position in positions if position < length)), name
            assert all(position % side == 0 for position in positions if position < length), name


@MANY
@given(registries())
def test_every_chunk_is_written_by_one_rank(registry: Registry) -> None:
    files, keys = PackedFiles(registry), []
    for rank in range(registry.mesh.world):
        file, end = files.get_rank_file(rank), 0
        for run in file.runs:
            assert run.base >= end
            assert run.stride >= run.nbytes + TRAILER
            assert run.base % 8 == run.stride % 8 == 0
            end = run.end
            keys += [chunk_key(run, number) for number in range(run.count)]
        assert end <= file.size
        assert file.size % PAGE == 0
    assert len(set(keys)) == len(keys)
    for name, layout in registry.layouts.items():
        grid = [-(-length // side) for length, side in zip(layout.shape, files.chunk(name), strict=True)]
        for index in product(*map(range, grid)):
            assert "/".join([name, "c", *map(str, index)]) in keys
    assert len(keys) == sum(
        prod(-(-length // side) for length, side in zip(layout.shape, files.chunk(name), strict=True))
        for name, layout in registry.layouts.items()
    )


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    ranges = [st.tuples(st.integers(0, n - 1), st.integers(1, n)) for n in shape]
    return st.tuples(*ranges).map(
        lambda found: Box(
            tuple(start for start, _ in found),
            tuple(min(length, n - start) for (start, length), n in zip(found, shape, strict=True)),
        )
    )


@MANY
@given(registries(), st.data())
def test_stored_boxes_overlapping_target_box_are_found(registry: Registry, data) -> None:
    for name, layout in registry.layouts.items():
        wanted = data.draw(boxes(layout.shape))
        found = sorted(overlap.find_stored_boxes(registry, name, wanted))
        brute = sorted(
            (registry.find_holders(name, box)[0], box)
            for box in registry.list_boxes(name)
            if not layout.shape or box.intersect(wanted) is not None
        )
        assert found == brute
        assert overlap.is_covered(registry, name, wanted)


@MANY
@given(registries(), st.data())
def test_chunks_overlapping_target_box_are_found(registry: Registry, data) -> None:
    files = PackedFiles(registry)
    for rank in range(registry.mesh.world):
        for run in files.get_rank_file(rank).runs:
            wanted = data.draw(boxes(registry[run.name].shape))
            found = {number for first, count in run.find_chunk_ranges(wanted) for number in range(first, first + count)}
            brute = {
                number
                for number in range(run.count)
                if not wanted.shape or run.chunk_box(number).intersect(wanted) is not None
            }
            assert brute <= found
            if len(wanted.shape) <= 1 or all(chunks == 1 for chunks in run.grid[1:]):
                assert brute == found
            assert sum(run.chunk_box(number).size for number in range(run.count)) == run.box.size


@MANY
@given(registries())
def test_zarr_json_round_trips_layout_and_document(registry: Registry) -> None:
    files, document = PackedFiles(registry), {"step": 3, "attempt": 1, "words": ["ö", None, 1.5]}
    content = packed.write(registry, files, document, "0badcafe")
    meta = zarr_json.read(content, "zarr.json")
    assert meta.document == document
    assert meta.registry.mesh == registry.mesh
    for rank in range(registry.mesh.world):
        assert meta.files.get_rank_file(rank) == files.get_rank_file(rank)
        for name in registry:
            assert meta.registry.list_rank_boxes(name, rank) == registry.list_rank_boxes(name, rank)
    kept = build_references(content, meta)["refs"]
    assert len(kept) == 1 + len(json.loads(content)["consolidated_metadata"]["metadata"]) + sum(
        run.count for rank in range(registry.mesh.world) for run in files.get_rank_file(rank).runs
    )


def test_every_flipped_bit_of_zarr_json_is_noticed() -> None:
    layout = Layout((8, 3), "float32", (Division(("dp_shard",), ((0, 4, 8),)),))
    registry = Registry.of(Mesh.of({"dp_shard": 2}), {"model/w": layout})
    content = packed.write(
        registry, PackedFiles(registry), {"step": 3, "attempt": 1, "learning_rate": 0.125, "name": "a"}, "0badcafe"
    )
    same = zarr_json.read(content, "zarr.json")
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            try:
                read = zarr_json.read(bytes(flipped), "zarr.json")
            except BadCheckpoint:
                continue
            assert (read.document, read.registry, read.write_id) == (same.document, same.registry, same.write_id)


def test_even_shard_boundaries_are_stored_compactly() -> None:
    """Check that an even split into 4,096 parts is stored as three numbers instead of 4,097 boundaries."""
    rows = tuple(3 * part for part in range(4097))
    layout = Layout((3 * 4096, 5), "float32", (Division(("dp_shard",), (rows,), rows=True),))
    registry = Registry.of(Mesh.of({"dp_shard": 4096}), {"model/w": layout})
    content = json.dumps(cuts.to_json(registry))
    assert len(content) < 400
    assert cuts.parse_registry(json.loads(content), {"model/w": ((3 * 4096, 5), "float32")}) == registry


@pytest.mark.parametrize("rows", [1, 1000, 50257, 1_000_003])
@pytest.mark.parametrize("columns", [1, 768, 16384])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_chunk_size_is_bounded_for_even_splits(rows: int, columns: int, parts: int) -> None:
    step = -(-rows // parts)
    cut = Division(("tp",), (tuple(min(rows, step * part) for part in range(parts + 1)),))
    chunk = chunk_shape(Layout((rows, columns), "float32", (cut,) if parts > 1 else ()))
    assert chunk[1] == columns
    nbytes = 4 * prod(chunk)
    assert nbytes <= LARGE
    if parts == 1:
        assert nbytes <= CHUNK_BYTES
        assert nbytes * 2 > min(CHUNK_BYTES, 4 * rows * columns) or 4 * columns * 2 > CHUNK_BYTES
