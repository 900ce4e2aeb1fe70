"""refs.json: file and offset of each chunk of a checkpoint, in the format of fsspec's reference file system.

With refs.json, stock zarr opens a checkpoint whose chunks are packed into one file per rank. Its content follows from
zarr.json, so it is built on request and not stored with every checkpoint, which may have millions of chunks.
"""

from __future__ import annotations

import json
from typing import Any

from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.checksum import CHECKSUM
from gangline_ckpt_zarr.format.chunks import ChunkRun
from gangline_ckpt_zarr.format.nodes import NAME

REFERENCES = "refs.json"
AT = "{{at}}/"  # template of the URL of the checkpoint


def build_references(content: bytes, meta: Meta, base: str = "") -> dict[str, Any]:
    """Return Kerchunk version 1: key -> text, or [URL, offset, length]. `base`: the checkpoint's URL and a slash."""
    refs: dict[str, Any] = {NAME: content.decode()}
    nodes = json.loads(content)["consolidated_metadata"]["metadata"]
    refs |= {f"{name}/{NAME}": json.dumps(node) for name, node in nodes.items()}
    for rank in sorted(meta.iterate_writers()):
        for run in meta.files.get_rank_file(rank).runs:
            for number in range(run.count):
                place = [base + meta.get_file_path(rank), run.base + number * run.stride, run.nbytes + CHECKSUM]
                refs[chunk_key(run, number)] = place
    return {"version": 1, "refs": refs}


def chunk_key(run: ChunkRun, number: int) -> str:
    """Return zarr's key of a chunk, under its array."""
    return "/".join((run.name, "c", *map(str, run.index(number))))
