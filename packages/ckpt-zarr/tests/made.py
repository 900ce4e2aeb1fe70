"""Real checkpoints for the tests: staged by an invented layout, written to a store, committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crc32c import crc32c

from gangline.checkpoint.id import CheckpointId
from gangline.config.schema import Run
from gangline.mesh import Mesh
from gangline.shard import Division, Layout, Registry, Shard
from gangline_ckpt_zarr.format import packed, zarr_json
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.checksum import TRAILER, compute_seal, compute_seal_start
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_ckpt_zarr.save.staging import Staging
from gangline_ckpt_zarr.stores.base import ObjectStore
from gangline_ckpt_zarr.stores.local import LocalStore

WRITE_ID = "0badcafe"

Values = Callable[[str, Layout], torch.Tensor]


def whole(name: str, layout: Layout) -> torch.Tensor:
    """Return the global array of a name: random integers from 0 to 250 in the dtype of the layout."""
    count = int(np.prod(layout.shape, dtype=np.int64))
    values = torch.randint(0, 251, (count,), generator=torch.Generator().manual_seed(len(name)))
    return values.to(getattr(torch, layout.dtype)).reshape(layout.shape)


def behind(start: int, number: int, checksum: int) -> bytes:
    """Return the trailer of a chunk: a checksum, which the caller computes with another library, and the seal."""
    return checksum.to_bytes(4, "little") + compute_seal(start, number, checksum).to_bytes(4, "little")


def staged(registry: Registry, values: Values = whole, write_id: str = WRITE_ID) -> dict[int, bytearray]:
    """Return the file of each rank, in memory, with checksums and seals filled in."""
    files, found = PackedFiles(registry), {}
    staging = Staging()
    for rank in range(registry.mesh.world):
        shards = [
            Shard(
                name, layout.shape, getattr(torch, layout.dtype), box.offset, values(name, layout)[box.slices], primary
            )
            for name, layout in registry.layouts.items()
            for box, primary in registry.list_rank_boxes(name, rank)
            if box.size
        ]
        file = files.get_rank_file(rank)
        staging.fill(file, shards)
        content = bytearray(file.size)
        if file.size:
            content[:] = staging._bytes[: file.size].numpy().tobytes()
        for run in file.runs:
            seals = compute_seal_start(write_id, run.name, run.box.offset)
            for number in range(run.count):
                start = run.base + number * run.stride
                end = start + run.nbytes
                content[end : end + TRAILER] = behind(seals, number, crc32c(content[start:end]))
        found[rank] = content
    staging.close()
    return found


def save(
    store: ObjectStore | str,
    registry: Registry,
    values: Values = whole,
    document: Mapping[str, Any] | None = None,
    write_id: str = WRITE_ID,
) -> Meta:
    """Save a complete checkpoint at the root of a store or in a directory; the name of that place gives the step."""
    store = LocalStore(store) if isinstance(store, str) else store
    id = CheckpointId.parse(store.url.rpartition("/")[2])
    for rank, content in staged(registry, values, write_id).items():
        if content:
            writer = store.create(packed.get_data_path(write_id, rank), len(content))
            writer.write(memoryview(content))
            writer.close()
    says = {"step": 0, "attempt": 1, **(document or {})}
    says |= {} if id is None else {"step": id.step, "attempt": id.attempt}
    text = packed.write(registry, PackedFiles(registry), says, write_id)
    store.commit(NAME, text)
    return zarr_json.read(text, NAME)


def cut(length: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """Return the boundaries of an even split of `length`, as a Division takes them."""
    step = -(-length // parts)
    return (tuple(min(length, step * part) for part in range(parts + 1)),)


def small(parts: int = 2) -> Registry:
    """Return a registry over two axes with arrays of every kind: by rows, by columns, not sharded, bfloat16, scalar."""
    rows = Division(("dp_shard",), cut(60, parts), rows=True)
    arrays = {
        "model/blocks.0.w": Layout((60, 32), "float32", (rows,)),
        "model/blocks.1.w": Layout((60, 32), "float32", (rows,)),
        "model/columns": Layout((8, 24), "float32", (Division(("tp",), cut(24, 2), 1),)),
        "model/half": Layout((12, 4), "bfloat16", (Division(("dp_shard",), cut(12, parts)),)),
        "model/bias": Layout((33,), "float64"),
        "optimizer/exp_avg/blocks.0.w": Layout((60, 32), "float32", (rows,)),
        "state/count": Layout((), "int64"),
        "state/mask": Layout((5, 5), "bool"),
    }
    return Registry.of(Mesh.of({"dp_shard": parts, "tp": 2}), arrays)


@cache
def _composed(words: tuple[str, ...]) -> Run:
    from gangline.config.compose import compose_one

    return compose_one([*words])


def composed(place: Path, *words: str) -> Run:
    """Compose a small run in this directory with checkpoint=zarr; equal overrides are composed only once."""
    run = deepcopy(_composed(("recipe=tiny", "checkpoint=zarr", *words)))
    run.job.dir = str(place)
    return run


def run_dir(place: Path, **options: Any) -> Path:
    """Create a run directory as core writes it, with checkpoint=zarr and the given checkpoint options."""
    from gangline.run.directory import RunDirectory

    RunDirectory.create(composed(place, *(f"checkpoint.{name}={value}" for name, value in options.items()))).unlock()
    return place
