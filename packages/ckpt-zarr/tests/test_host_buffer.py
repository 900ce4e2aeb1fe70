"""Host memory of a load: groups of bounded size, equal bytes, memory pinned for a GPU and released."""

from __future__ import annotations

import made
import pytest
import torch
from test_reading import filled, staged

from gangline.mesh import Mesh
from gangline.shard import Division, Layout, Registry, Shard
from gangline_ckpt_zarr.load import host_buffer
from gangline_ckpt_zarr.load.host_buffer import HostBuffer

REGISTRY = Registry.of(
    Mesh.of({"dp_shard": 2}),
    {
        "model/w": Layout((600, 64), "float32", (Division(("dp_shard",), ((0, 300, 600),), rows=True),)),
        "model/half": Layout((300, 50), "bfloat16"),
        "model/flag": Layout((7,), "bool"),
        "model/scale": Layout((), "float64"),
    },
)
LARGEST = 64 * 600 * 4


def make_shards() -> list[Shard]:
    """Return shards that are read through the buffer, because their dtype differs, and one that is read directly."""
    dtypes = {"model/w": torch.float64, "model/half": torch.float32, "model/scale": torch.float32}
    return [
        Shard(name, layout.shape, dtype, (0,) * len(layout.shape), torch.zeros(layout.shape, dtype=dtype), primary=True)
        for name, layout in REGISTRY.layouts.items()
        for dtype in [dtypes.get(name, torch.bool)]
    ]


@pytest.mark.parametrize(("limit", "groups"), [(None, 1), (1 << 30, 1), (LARGEST, 2), (20_000, 10)])
def test_groups_fill_shards_within_the_limit(limit: int | None, groups: int) -> None:
    meta, files = staged(REGISTRY)
    shards, count = make_shards(), 0
    buffer = HostBuffer(shards, meta, limit)
    assert buffer._size <= (limit or 1 << 30)
    with buffer.open_groups() as opened:
        for group in opened:
            filled(meta, files, group.targets)
            group.copy()
            count += 1
    assert count == groups
    for shard in shards:
        assert torch.equal(shard.local, made.whole(shard.name, REGISTRY[shard.name]).to(shard.dtype))


def test_row_above_the_limit_has_own_group() -> None:
    meta, files = staged(REGISTRY)
    shards = make_shards()[:1]
    buffer = HostBuffer(shards, meta, 100)
    assert (buffer._size, len(buffer._groups)) == (256, 600)
    with buffer.open_groups() as opened:
        for group in opened:
            filled(meta, files, group.targets)
            group.copy()
    assert torch.equal(shards[0].local, made.whole("model/w", REGISTRY["model/w"]).double())


@pytest.mark.parametrize("works", [True, False])
def test_buffer_for_gpu_is_pinned_and_released(monkeypatch, works: bool) -> None:
    """Pin by a stub, because this machine may have no GPU; the buffer is released also after an error."""
    meta, _ = staged(REGISTRY)
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(host_buffer, "pin", lambda memory: calls.append(("pin", memory.nbytes)) or works)
    monkeypatch.setattr(host_buffer, "release", lambda memory: calls.append(("release", memory.nbytes)))
    buffer = HostBuffer(make_shards(), meta, 20_000)
    assert not buffer._pins, "no shard is on a GPU"
    buffer._pins = True

    def fail() -> None:
        with buffer.open_groups() as opened:
            assert {group._pinned for group in opened} == {works}
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert calls == [("pin", buffer._size), ("release", buffer._size)][: 1 + works]
