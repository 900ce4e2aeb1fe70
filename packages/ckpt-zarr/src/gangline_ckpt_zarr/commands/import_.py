"""`gangline ckpt import`: a Hugging Face directory as the checkpoint that a run begins with, chunk by chunk."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.checkpoint.base import CheckpointId
from gangline.errors import UserError
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.where import parser
from gangline_ckpt_zarr.format.metadata import NAME
from gangline_ckpt_zarr.stores.open import open_store

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.shard import Registry, Shard
    from gangline_ckpt_zarr.stores.base import Store

FIRST = CheckpointId(0)


def run(argv: Sequence[str]) -> int:
    """Make step-00000000 of the weights alone, and print the command that trains on from it."""
    words = parser("import", "Make the checkpoint that a run begins with of a Hugging Face directory.", tier=False)
    words.add_argument("directory", metavar="DIR", help="config.json and safetensors")
    words.add_argument("out", metavar="RUN_DIR", help="the directory of a run to be, or a URL for its checkpoints")
    options = words.parse_args(list(argv))

    from gangline.config.compose import compose_one
    from gangline.interop.commands import words_for

    directory = Path(options.directory).expanduser().resolve()
    remote = "://" in options.out
    out = options.out.rstrip("/")
    if not remote and os.path.exists(f"{out}/config.yaml"):
        raise UserError(f"{out} already holds a run.", "Name a directory that does not exist yet.")
    settings = [word for word in words_for(directory) if not word.startswith("model.weights=")]  # they will be here
    settings = ["model=decoder", *settings, "checkpoint=zarr"]
    root = out if remote else f"{os.path.abspath(out)}/checkpoints"
    store = open_store(f"{root}/{FIRST}")
    if store.exists(NAME):
        raise UserError(f"{store.url} is a whole checkpoint already.", "Name another place.")
    _write(store, directory, compose_one(settings))
    place = f"checkpoint.path={out}" if remote else f"run.dir={out}"
    print(" \\\n  ".join([f"train {settings[0]}", *settings[1:], place]))
    return 0


def _write(store: Store, directory: Path, trained: Run) -> None:
    import torch

    from gangline.config.serial import to_dict
    from gangline.interop import load_pretrained
    from gangline.mesh import Mesh
    from gangline.model.build import construct
    from gangline.model.compose import compose_model
    from gangline.model.init import shards_of
    from gangline.rundir import part_versions
    from gangline.shard import Layout, Registry
    from gangline.state import Document
    from gangline.train.restore import fingerprint
    from gangline_ckpt_zarr.format import metadata
    from gangline_ckpt_zarr.format.cells import Files

    tree, plan = compose_model(trained)
    arrays = shards_of(construct(tree), plan)  # without their memory
    registry = Registry.of(
        Mesh.of({}),
        {shard.name: Layout(shard.global_shape, str(shard.dtype).removeprefix("torch.")) for shard in arrays},
    )
    document = Document(
        step=FIRST.step,
        attempt=FIRST.attempt,
        cursor=0,
        seed=trained.run.seed,
        parts=part_versions(trained),
        model=fingerprint(registry),
        config=to_dict(trained),
    )
    write_id = secrets.token_hex(4)
    try:
        with torch.no_grad():
            load_pretrained(directory, _cells(store, registry, write_id), plan, trained.run.seed)
        content = metadata.write(registry, Files(registry), document.to_dict(), write_id)
        store.commit(NAME, content)
    except BaseException:
        store.delete(os.path.dirname(metadata.data_path(write_id, 0)))
        raise


def _cells(store: Store, registry: Registry, write_id: str) -> Iterator[Shard]:
    """Gives each chunk to be filled, and writes it where it lies in the file when asked for the next."""
    import torch
    from fastcrc.crc32 import iscsi as crc32c

    from gangline.shard import Shard
    from gangline_ckpt_zarr.commands.blocks import Blocks
    from gangline_ckpt_zarr.format.cells import Files
    from gangline_ckpt_zarr.format.grid import stored_dtype
    from gangline_ckpt_zarr.format.metadata import data_path
    from gangline_ckpt_zarr.format.seal import seal_start, trailer

    file = Files(registry).of_rank(0)
    with (
        text.progress("import", file.size) as advance,
        Blocks(store, data_path(write_id, 0), file.size) as blocks,
    ):
        for run in file.runs:
            layout, seals = registry[run.name], seal_start(write_id, run.name, run.box.offset)
            whole = torch.zeros(run.chunk, dtype=getattr(torch, stored_dtype(layout.dtype)))
            for number in range(run.count):
                box = run.cell_box(number)
                part = torch.empty(box.shape, dtype=getattr(torch, layout.dtype))
                yield Shard(run.name, layout.shape, part.dtype, box.offset, part)
                if box.shape != run.chunk:
                    whole.zero_()  # what lies beyond the array's end
                whole[tuple(slice(0, length) for length in box.shape)] = part
                cell = whole.reshape(-1).view(torch.uint8).numpy().data
                blocks.pad(run.base + number * run.stride)
                blocks.put(cell)
                blocks.put(trailer(seals, number, crc32c(cell)))
                advance(run.stride)
