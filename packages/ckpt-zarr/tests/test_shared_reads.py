"""Shared reads of replicas: each byte is read by one replica, by a plan computed without messages."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from pathlib import Path

import made
import pytest
from hypothesis import given, settings, strategies as st
from layouts import registries
from sharing_ranks import ID, loaded, registry, whole

from gangline.shard import Registry
from gangline_ckpt_zarr.format import packed, zarr_json
from gangline_ckpt_zarr.format.dtypes import count_itemsize
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_ckpt_zarr.load import shared
from gangline_testkit.pool import get_pool


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    document = {"step": ID.step, "attempt": ID.attempt}
    made.save(str(tmp_path / str(ID)), registry(), whole, document)
    return tmp_path


def test_each_byte_is_read_by_one_replica(saved: Path) -> None:
    found = get_pool(4).run(loaded, str(saved), None, saved.name)
    assert [right for _, _, right in found] == [True] * 4
    stored = sum(prod(layout.shape) * count_itemsize(layout.dtype) for layout in registry().layouts.values())
    read = [nbytes for nbytes, _, _ in found]
    assert stored <= sum(read) < 1.1 * stored  # including checksums, seals and gaps
    assert sum(own for _, own, _ in found) > 2 * stored
    assert max(read) < 1.3 * sum(read) / 4


def test_partial_load_is_not_shared(saved: Path) -> None:
    """Load some of the arrays, as sampling does: no rank may wait for a rank that does not take part."""
    found = get_pool(4).run(loaded, str(saved), ("model/rows.0", "model/count"), saved.name)
    assert [right for _, _, right in found] == [True] * 4
    assert all(read >= own for read, own, _ in found)


def test_damage_read_by_one_rank_raises_on_all(saved: Path) -> None:
    """Check that no rank waits for data from the rank that found the damage."""
    files = sorted((saved / str(ID)).glob("data-*/*.bin"))
    content = bytearray(files[0].read_bytes())
    content[100] ^= 1
    damaged = PackedFiles(registry()).get_rank_file(0).runs[0].name
    files[0].write_bytes(content)
    found = get_pool(4).run(loaded, str(saved), None, saved.name)
    assert {damage for _, _, damage in found} == {(damaged, str(files[0]))}


@settings(max_examples=100, deadline=None)
@given(registries(), st.integers(1, 4), st.sampled_from([16, 64, 1 << 20]))
def test_ranks_agree_on_plan_of_shared_reads(wanted: Registry, together: int, slice_bytes: int) -> None:
    """Check that slices tile a rank's boxes, and that two ranks agree on order, reader and step of common slices."""
    meta = zarr_json.read(packed.write(wanted, PackedFiles(wanted), {"step": 1, "attempt": 1}, "0badcafe"), "zarr.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "SLICE", slice_bytes)
        patch.setattr(shared, "STEP", 4 * slice_bytes)
        seen = {rank: [*shared.split_shared(meta, wanted, rank, together)] for rank in range(wanted.mesh.world)}
    between: dict[tuple[int, int], dict[int, list]] = defaultdict(dict)
    for rank, found in seen.items():
        covered: dict[tuple, int] = defaultdict(int)
        for part in found:
            assert rank in part.ranks
            assert part.reader in part.ranks
            assert len(part.ranks) <= together
            assert part.box.intersect(part.whole) == part.box or not part.box.shape
            covered[part.name, part.whole] += part.box.size
        held = {(name, box) for name in wanted for box, _ in wanted.list_rank_boxes(name, rank) if box.size}
        assert covered == {(name, box): box.size for name, box in held}
        assert [part.step for part in found] == sorted(part.step for part in found)
        for other in {other for part in found for other in part.ranks}:
            between[min(rank, other), max(rank, other)][rank] = [part for part in found if other in part.ranks]
    for pair in between.values():
        assert len({tuple(parts) for parts in pair.values()}) == 1
