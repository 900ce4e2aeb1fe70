"""Rank functions for the tests of shared reads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from gangline.checkpoint.id import CheckpointId
from gangline.errors import BadCheckpoint
from gangline.mesh import Mesh
from gangline.shard import Division, Layout, Registry, Shard
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.load.shards import load
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_ckpt_zarr.tiers.stored import StoreTier
from gangline_testkit import rank

ID = CheckpointId(7)
MESH = Mesh.of({"dp_replicate": 2, "dp_shard": 2})


class Far(LocalStore):
    """Local store that counts as shared by all machines, and counts the data bytes read from it."""

    local = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes = 0
        self._lock = threading.Lock()

    def open_reader(self, path: str):
        with self._lock:
            inner = super().open_reader(path)
        return _Counted(self, inner)


class _Counted:
    def __init__(self, store: Far, inner) -> None:
        self.store, self.inner = store, inner

    def __enter__(self):
        read = self.inner.__enter__()

        def counted(ranges: Sequence) -> None:
            self.store.read_bytes += sum(len(buffer) for _, buffers in ranges for buffer in buffers)
            read(ranges)

        return counted

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)


def registry() -> Registry:
    """Return arrays on four ranks: row or column shards on two ranks each, replicas on all, shards of one rank."""

    def over(axes: tuple[str, ...], length: int, dim: int = 0) -> tuple[Division, ...]:
        parts = MESH.size(*axes)
        return (Division(axes, (tuple(length * part // parts for part in range(parts + 1)),), dim),)

    layouts = {}
    for number in range(6):
        layouts |= {
            f"model/rows.{number}": Layout((600, 64), "float32", over(("dp_shard",), 600)),
            f"model/columns.{number}": Layout((320, 64), "float32", over(("dp_shard",), 64, 1)),
            f"model/whole.{number}": Layout((500, 50), "bfloat16"),
        }
    layouts |= {
        "model/alone": Layout((400, 32), "float32", over(("dp_replicate", "dp_shard"), 400)),
        "model/count": Layout((), "int64"),
    }
    return Registry.of(MESH, layouts)


def whole(name: str, layout: Layout) -> torch.Tensor:
    count = Layout(layout.shape).nbytes // 4
    return ((torch.arange(count) * 7 + len(name)) % 251).to(getattr(torch, layout.dtype)).reshape(layout.shape)


def loaded(directory: str, names: Sequence[str] | None, token: str) -> tuple[int, int, bool | tuple[str, str]]:
    """Load arrays on this rank; return (bytes read, bytes of this rank's shards, result).

    The result is whether all values are right, or (array, file) of the damage.
    """
    found, shards = registry(), []
    for name, layout in found.layouts.items():
        if names is None or name in names:
            shards += [
                Shard(
                    name,
                    layout.shape,
                    getattr(torch, layout.dtype),
                    box.offset,
                    torch.zeros(box.shape, dtype=getattr(torch, layout.dtype)),
                )
                for box, _ in found.list_rank_boxes(name, rank.index)
            ]
    store = Far(Path(directory))
    tier = StoreTier("far", store)
    agreement = Agreement(rank.make_comms(MESH).store, f"sharing/{token}", rank.index, rank.world)
    own = sum(shard.local.numel() * (4 if shard.dtype != torch.int64 else 8) for shard in shards)
    try:
        load(ID, [(tier, tier.read_meta(ID))], shards, found, agreement)
    except BadCheckpoint as bad:
        return store.read_bytes, own, (bad.array, bad.file)
    right = all(torch.equal(shard.local, whole(shard.name, found[shard.name])[shard.box.slices]) for shard in shards)
    return store.read_bytes, own, right
