"""Native zarr: a checkpoint that any zarr reader opens by its path, each chunk under zarr's own key.

Each chunk is a file of its own, or all chunks of an array are in one zarr shard.

Readers are fastest with a file for each chunk (zarr-python reads an array of chunk files up to four times as fast as a
shard of equal chunks), so an array is a shard only if it would have many files. Chunks and their checksums equal the
source checkpoint's byte for byte. The copy is still a checkpoint: each file counts as the file of one rank of a
mesh. The `pp` coordinate of the rank is the number of the array, and its `tp` coordinate is the number of the chunk.

zarr's own files have no space for seals. To detect an intact chunk of another checkpoint or position, the root's
zarr.json contains the checksum of every chunk.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, final

from gangline.mesh import Mesh
from gangline.shard import Box, Division, Layout, Places, Registry, find_primary_replica
from gangline_ckpt_zarr.format import claims, cuts
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.checksum import CHECKSUM, MISPLACED, find_trailer_error, make_trailer
from gangline_ckpt_zarr.format.chunks import CheckpointFiles, ChunkRun, RankFile, lay_out
from gangline_ckpt_zarr.format.nodes import CODECS, FORMAT, build_array_node, encode_root
from gangline_ckpt_zarr.format.references import chunk_key

MOST_FILES = 64  # maximum number of files per array; a power of two
_ENTRY = struct.Struct("<QQ")  # entry of a shard's index: offset and length of a chunk


@final
class NativeFiles(CheckpointFiles):
    """Files of native zarr: one for each chunk, or one for an array that is a shard."""

    def _lay_out(self, rank: int) -> RankFile:
        file = lay_out(self._iterate_boxes(rank))
        size = sum(run.nbytes + CHECKSUM if run.count == 1 else run.end + index_bytes(run) for run in file.runs)
        return RankFile(file.runs, size, file.dtypes)

    def _iterate_boxes(self, rank: int) -> Iterator[tuple[str, str, tuple[int, ...], Box]]:
        coordinate = self.registry.mesh.coordinate(rank)
        name = self._names[coordinate["pp"]]
        layout = self.registry[name]
        places = Places(self.registry.mesh, layout)
        parts, replica = places.of(coordinate)
        if replica == find_primary_replica(layout, parts, places.writers):
            yield from ((name, layout.dtype, self.chunk(name), box) for box in layout.list_boxes(parts) if box.size)

    @property
    def _names(self) -> list[str]:
        return list(self.registry.layouts)


@final
@dataclass(frozen=True)
class NativeMeta(Meta):
    """Metadata of native zarr. `sums`: array name -> checksum of every chunk, in C order of the chunk grid."""

    sums: dict[str, list[int]] = field(default_factory=dict)

    def get_file_path(self, rank: int) -> str:
        return chunk_key(self.files.get_rank_file(rank).runs[0], 0)

    @property
    def trailer(self) -> int:
        """Number of bytes of the checksum alone: zarr's own files have no space for a seal."""
        return CHECKSUM

    def compute_seal_start(self, run: ChunkRun) -> None:
        """Return None: there are no seals."""

    def find_chunk_error(self, run: ChunkRun, number: int, checksum: int, trailer: bytes | memoryview) -> str:
        why = find_trailer_error(None, number, checksum, trailer)
        if not why and self.sums[run.name][place(run, number, self.registry[run.name])] != checksum:
            return MISPLACED
        return why

    def build_nodes(self) -> dict[str, dict[str, Any]]:
        nodes = {}
        for name, layout in self.registry.layouts.items():
            chunk = self.files.chunk(name)
            node = nodes[name] = build_array_node(layout.shape, layout.dtype, chunk)
            grid = compute_grid(layout, chunk)
            if is_shard(layout, grid):
                whole = [chunks * side for chunks, side in zip(grid, chunk, strict=True)]
                inner = {"chunk_shape": list(chunk), "codecs": node["codecs"]}
                sharding = inner | {"index_codecs": CODECS, "index_location": "end"}
                node["codecs"] = [{"name": "sharding_indexed", "configuration": sharding}]
                node["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": whole}}
        return nodes


def compute_grid(layout: Layout, chunk: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of chunks along each dim of an array."""
    return tuple(-(-length // side) for length, side in zip(layout.shape, chunk, strict=True))


def place(run: ChunkRun, number: int, layout: Layout) -> int:
    """Return the position of chunk `number` of a chunk run among all chunks of the array, in C order."""
    position = 0
    for at, chunks in zip(run.index(number), compute_grid(layout, run.chunk), strict=True):
        position = position * chunks + at
    return position


def as_native(meta: Meta) -> NativeMeta:
    """Return the metadata of a native copy. Its checksums are 0 until the writer of the chunks fills them in."""
    grids = {name: compute_grid(layout, meta.files.chunk(name)) for name, layout in meta.registry.layouts.items()}
    padded = {name: tuple(1 << max(0, chunks - 1).bit_length() for chunks in grid) for name, grid in grids.items()}
    most = max((prod(parts) for parts in padded.values() if prod(parts) <= MOST_FILES), default=1)
    layouts = {
        name: Layout(
            layout.shape,
            layout.dtype,
            tuple(_make_divisions(layout, meta.files.chunk(name), padded[name])),
            (("pp", number),),
        )
        for number, (name, layout) in enumerate(meta.registry.layouts.items())
    }
    registry = Registry(Mesh.of({"pp": max(1, len(layouts)), "tp": most}), layouts)
    chunks = {name: meta.files.chunk(name) for name in layouts}
    sums = {name: [0] * prod(grid) for name, grid in grids.items()}
    return NativeMeta(meta.document, registry, NativeFiles(registry, chunks), meta.write_id, sums)


def _make_divisions(layout: Layout, chunk: tuple[int, ...], padded: tuple[int, ...]) -> Iterator[Division]:
    """Yield one division per dim, so that each chunk has its own `tp` coordinate.

    Yield nothing for an array with more than `MOST_FILES` chunks, which is stored as one zarr shard.
    """
    if prod(padded) > MOST_FILES:
        return
    for dim, (length, side, parts) in enumerate(zip(layout.shape, chunk, padded, strict=True)):
        bounds = tuple(min(length, side * part) for part in range(parts + 1))
        yield Division(("tp",), (bounds,), dim, every=prod(padded[dim + 1 :]))


def is_shard(layout: Layout, grid: tuple[int, ...]) -> bool:
    """Return whether an array of native zarr is one shard."""
    return not layout.divisions and prod(grid) > 1


def index_bytes(run: ChunkRun) -> int:
    """Return the size of a shard's index in bytes."""
    return run.count * _ENTRY.size + CHECKSUM


def index(run: ChunkRun) -> bytes:
    """Return the index at the end of a shard: offset and length of each chunk, in C order, and a checksum."""
    entries = b"".join(
        _ENTRY.pack(run.base + number * run.stride, run.nbytes + CHECKSUM) for number in range(run.count)
    )
    return entries + make_trailer(None, 0, entries)


def encode_nodes(content: bytes) -> dict[str, bytes]:
    """Return the zarr.json of each array and group, by name, from the content of the root's zarr.json."""
    nodes = json.loads(content)["consolidated_metadata"]["metadata"]
    return {name: json.dumps(node).encode() for name, node in nodes.items()}


def chunk_of(node: dict[str, Any]) -> Any:
    """Return the chunk shape in an array's metadata: the inner chunk shape if the array is a shard."""
    first = node["codecs"][0]
    grid = first if first["name"] == "sharding_indexed" else node["chunk_grid"]
    return grid["configuration"]["chunk_shape"]


def write(meta: NativeMeta) -> bytes:
    """Return the content of the root's zarr.json."""
    ours = {
        "format": FORMAT,
        "open": True,
        "document": meta.document,
        "write_id": meta.write_id,
        "layout": cuts.to_json(meta.registry),
        "sums": {name: b64encode(_make_struct(len(sums)).pack(*sums)).decode() for name, sums in meta.sums.items()},
    }
    return encode_root(meta.build_nodes(), ours)


def read(ours: dict[str, Any], registry: Registry, arrays: dict[str, dict[str, Any]]) -> NativeMeta:
    """Parse the metadata in zarr.json. Raises ValueError, KeyError or TypeError if it is invalid."""
    chunks = {name: claims.chunk(chunk_of(node), registry[name], name) for name, node in arrays.items()}
    if ours["sums"].keys() != chunks.keys():
        raise ValueError("the arrays with checksums differ from the arrays in zarr's metadata")
    sums = {}
    for name, text in ours["sums"].items():
        content, count = b64decode(text, validate=True), prod(compute_grid(registry[name], chunks[name]))
        if len(content) != count * CHECKSUM:
            raise ValueError(f"{name} has {count:,} chunks, but {len(content) // CHECKSUM:,} checksums")
        sums[name] = [*_make_struct(count).unpack(content)]
    return NativeMeta(ours["document"], registry, NativeFiles(registry, chunks), ours["write_id"], sums)


def _make_struct(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")
