"""zarr.json of a checkpoint: the metadata of every array, and under attributes["gangline"] what zarr does not know.

It is the commit: put last and in one act, so a checkpoint is whole if and only if it is there. It carries a checksum of
itself, for nothing else would notice a flipped digit in a learning rate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from threading import local
from typing import Any, ClassVar, cast

from fastcrc.crc32 import iscsi as crc32c

from gangline.checkpoint.id import CheckpointId
from gangline.errors import BadCheckpoint
from gangline.shard import Registry
from gangline_ckpt_zarr.format import claims, cuts, overlap
from gangline_ckpt_zarr.format.checksum import CHECKSUM, TRAILER, seal_start, wrong
from gangline_ckpt_zarr.format.chunks import CheckpointFiles, ChunkRun
from gangline_ckpt_zarr.format.grid import stored_dtype, stored_itemsize
from gangline_ckpt_zarr.format.owners import box_owners
from gangline_ckpt_zarr.stores.base import ObjectStore

NAME = "zarr.json"
FORMAT = 1
_WRITE_ID = re.compile("[0-9a-f]{8}")
MOST_BYTES = 256 << 20  # 1 kB for each of 250,000 arrays
_seen = local()
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


@dataclass(frozen=True)
class Meta:
    """What zarr.json says."""

    sealed: ClassVar[bool] = True  # whether chunks have seals

    document: dict[str, Any]
    registry: Registry
    files: CheckpointFiles
    write_id: str

    def path(self, rank: int) -> str:
        """The file of a rank, in the checkpoint's directory."""
        return data_path(self.write_id, rank)

    @property
    def trailer(self) -> int:
        """Bytes behind each chunk: its checksum, and its seal where it has one."""
        return TRAILER if self.sealed else CHECKSUM

    def seal_start(self, run: ChunkRun) -> int | None:
        """What the seals of a run's chunks start from; None where they have none."""
        return seal_start(self.write_id, run.name, run.box.offset) if self.sealed else None

    def wrong(self, run: ChunkRun, number: int, checksum: int, trailer: bytes | memoryview) -> str:
        """Why a chunk, of which `checksum` is the crc32c, is not what was written here; "" where it is."""
        return wrong(self._sealed(run), number, checksum, trailer)

    def _sealed(self, run: ChunkRun) -> int | None:
        """`seal_start`, remembered for the run seen last by a thread."""
        last = getattr(_seen, "last", None)
        if last is None or last[0] is not run or last[1] is not self:
            _seen.last = last = run, self, self.seal_start(run)
        return last[2]

    def writers(self) -> Iterator[int]:
        """The ranks that have a file, each once: found by what was cut, for ranks without one may be many more."""
        seen, cut = set[int](), set()
        for layout in self.registry.layouts.values():
            alike = box_owners(self.registry.mesh, layout)
            if (alike, layout.turn) in cut:
                continue
            cut.add((alike, layout.turn))
            for rank in overlap.writers(alike, layout.turn):
                if rank not in seen:
                    seen.add(rank)
                    yield rank

    @cached_property
    def nbytes(self) -> int:
        """Of all arrays, as they are stored."""
        return sum(prod(layout.shape) * stored_itemsize(layout.dtype) for layout in self.registry.layouts.values())

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: layout.shape for name, layout in self.registry.layouts.items()}


def data_path(write_id: str, rank: int) -> str:
    return f"data-{write_id}/{rank:05d}.bin"


def array_metadata(shape: tuple[int, ...], dtype: str, chunk: tuple[int, ...]) -> dict[str, Any]:
    """zarr v3 metadata of one array."""
    stored = stored_dtype(dtype)
    zero = False if stored == "bool" else 0.0 if stored.startswith("float") else 0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": stored,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero,
        "codecs": CODECS if stored not in ("bool", "int8", "uint8") else [{"name": "bytes"}, CODECS[1]],
        "attributes": {"dtype": dtype},
        "storage_transformers": [],
    }


def write(registry: Registry, files: CheckpointFiles, document: dict[str, Any], write_id: str) -> bytes:
    """The content of zarr.json. Raises ValueError where it would not be read again."""
    cuts.check(registry)
    claims.depth(document)
    arrays = array_nodes(registry, files)
    ours: dict[str, Any] = {
        "format": FORMAT,
        "document": document,
        "write_id": write_id,
        "layout": cuts.to_json(registry),
    }
    return root(arrays, ours)


def array_nodes(registry: Registry, files: CheckpointFiles) -> dict[str, dict[str, Any]]:
    """zarr v3 metadata of every array."""
    return {
        name: array_metadata(layout.shape, layout.dtype, files.chunk(name)) for name, layout in registry.layouts.items()
    }


def groups(arrays: Iterable[str]) -> dict[str, dict[str, Any]]:
    """zarr v3 metadata of every group that these arrays lie in."""
    names = {"/".join(parts[:end]) for parts in (name.split("/") for name in arrays) for end in range(1, len(parts))}
    return {name: {"zarr_format": 3, "node_type": "group", "attributes": {}} for name in sorted(names)}


def root(arrays: dict[str, dict[str, Any]], ours: dict[str, Any]) -> bytes:
    """A root group with these arrays in its consolidated metadata."""
    content = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"gangline": ours},
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": groups(arrays) | arrays},
    }
    ours.pop("checksum", None)
    ours["checksum"] = 0  # last, where `_signature` says
    text = json.dumps(content, separators=(",", ":")).encode()
    return text.replace(_signature(0), _signature(crc32c(text)))


def _signature(checksum: int) -> bytes:
    """Where the checksum stands: as the last of our attributes, so nothing that a document holds is taken for it."""
    return b'"checksum":%d}},"consolidated_metadata":' % checksum


def _checksum(content: bytes, stored: int) -> int:
    """crc32c of the content with 0 in the place of the checksum."""
    if content.count(_signature(stored)) != 1:
        raise ValueError("its checksum is not where it was put")
    return crc32c(content.replace(_signature(stored), _signature(0)))


def content_of(store: ObjectStore, path: str = NAME) -> bytes:
    """The bytes of a zarr.json. Raises BadCheckpoint where no document is so long, FileNotFoundError."""
    if store.local and (there := store.size(path)) > MOST_BYTES:
        raise BadCheckpoint("every array", None, f"{store.url}/{path}", f"it has {there:,} bytes")
    return store.read(path)


def read(content: bytes, file: str, id: CheckpointId | None = None) -> Meta:
    """What zarr.json says; `id`: of which checkpoint it must be. Raises BadCheckpoint where it is not what was written.

    That it claims no more than there is on disk is for those to see who go by its sizes; see `standing`.
    """
    try:
        found = json.loads(content)
        claims.depth(found)
        ours = found["attributes"]["gangline"]
        if ours["checksum"] != _checksum(content, ours["checksum"]):
            raise ValueError("its checksum differs")
        if ours["format"] != FORMAT:
            raise ValueError(f"it is of format {ours['format']}, and this version reads format {FORMAT}")
        if not _WRITE_ID.fullmatch(ours["write_id"]):
            raise ValueError(f"{ours['write_id']!r} is no write id")
        document = claims.mapping(ours["document"], "its document")
        says = CheckpointId(*claims.identity(document))
        if id is not None and says != id:
            raise ValueError(f"it is of {says}")
        nodes = found["consolidated_metadata"]["metadata"]
        arrays = {name: node for name, node in nodes.items() if node["node_type"] == "array"}
        shapes = {
            name: (claims.shape(node["shape"], name), node["attributes"]["dtype"]) for name, node in arrays.items()
        }
        registry = cuts.of_json(ours["layout"], shapes)
        if ours.get("open"):
            from gangline_ckpt_zarr.format import native

            meta: Meta = native.read(ours, registry, arrays)
            written = native.nodes(cast("native.NativeMeta", meta))
        else:
            chunks = {
                name: claims.chunk(node["chunk_grid"]["configuration"]["chunk_shape"], registry[name], name)
                for name, node in arrays.items()
            }
            meta = Meta(document, registry, CheckpointFiles(registry, chunks), ours["write_id"])
            written = array_nodes(registry, meta.files)
        if nodes != groups(written) | written:
            raise ValueError("what it tells zarr is not what it tells gangline")
        return meta
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise BadCheckpoint("every array", None, file, _why(error)) from error


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
