"""Writer of a checkpoint that contains only weights, from which a run starts.

The checkpoint has step 0 and the layout of one process. It is written chunk by chunk.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gangline import UserError
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.format import packed
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_ckpt_zarr.stores.open import open_store

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.shard import Registry, Shard
    from gangline_ckpt_zarr.stores.base import ObjectStore

FIRST = CheckpointId(0)


def place_for(out: str) -> ObjectStore:
    """Return the store of the new checkpoint step-00000000.

    It is in `out`/checkpoints if `out` is a new run directory, and in `out` itself if `out` is a URL. Raises UserError
    if a run or a complete checkpoint exists there.
    """
    if "://" not in out and os.path.exists(f"{out}/config.yaml"):
        raise UserError(f"{out} already contains a run.", "Name a directory that does not exist.")
    store = open_store(f"{out if '://' in out else f'{os.path.abspath(out)}/checkpoints'}/{FIRST}")
    if store.exists(NAME):
        raise UserError(f"{store.url} already contains a checkpoint.", "Name another directory or URL.")
    return store


def write_weights(
    store: ObjectStore,
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    trained: Run,
    config: dict[str, Any],
    fill: Callable[[Iterator[Shard]], None],
    base: Mapping[str, Any] | None = None,
    model: str | None = None,
) -> None:
    """Write a checkpoint of arrays with these names, shapes and dtypes. After an error, its files are deleted.

    `fill` takes the chunks of all arrays, one after another, and writes values into the memory of each chunk.
    `trained`: the run that the weights belong to; `config`: the configuration of this run as plain data. `base`: record
    of the arrays that the checkpoint omits; `model`: fingerprint of the full model, if arrays are omitted.
    """
    import torch

    from gangline.checkpoint.document import Document
    from gangline.mesh import Mesh
    from gangline.run.directory import find_part_versions
    from gangline.shard import Layout, Registry
    from gangline.train.restore import compute_fingerprint

    registry = Registry.of(Mesh.of({}), {name: Layout(shape, dtype) for name, (shape, dtype) in shapes.items()})
    document = Document(
        step=FIRST.step,
        attempt=FIRST.attempt,
        cursor=0,
        seed=trained.seed,
        parts=find_part_versions(trained),
        model=model or compute_fingerprint(registry),
        base=dict(base or {}),
        config=config,
    )
    write_id = secrets.token_hex(4)
    try:
        with torch.no_grad():
            fill(_write_chunks(store, registry, write_id))
        content = packed.write(registry, PackedFiles(registry), document.to_dict(), write_id)
        store.commit(NAME, content)
    except BaseException:
        store.delete(os.path.dirname(packed.get_data_path(write_id, 0)))
        raise


def _write_chunks(store: ObjectStore, registry: Registry, write_id: str) -> Iterator[Shard]:
    """Yield each chunk to be filled, and write it to its offset in the file when the next chunk is requested."""
    import torch

    from gangline.shard import Shard
    from gangline_ckpt_zarr.commands.blocks import Blocks
    from gangline_ckpt_zarr.format.checksum import compute_seal_start, make_trailer
    from gangline_ckpt_zarr.format.dtypes import map_dtype
    from gangline_ckpt_zarr.format.packed import get_data_path

    file = PackedFiles(registry).get_rank_file(0)
    with (
        text.show_progress("write", file.size) as advance,
        Blocks(store, get_data_path(write_id, 0), file.size) as blocks,
    ):
        for run in file.runs:
            layout, seals = registry[run.name], compute_seal_start(write_id, run.name, run.box.offset)
            whole = torch.zeros(run.chunk, dtype=getattr(torch, map_dtype(layout.dtype)))
            for number in range(run.count):
                box = run.chunk_box(number)
                part = torch.empty(box.shape, dtype=getattr(torch, layout.dtype))
                yield Shard(run.name, layout.shape, part.dtype, box.offset, part)
                if box.shape != run.chunk:
                    whole.zero_()  # padding beyond the array's end
                whole[tuple(slice(0, length) for length in box.shape)] = part
                chunk = whole.reshape(-1).view(torch.uint8).numpy().data
                blocks.pad(run.base + number * run.stride)
                blocks.put(chunk)
                blocks.put(make_trailer(seals, number, chunk))
                advance(run.stride)
