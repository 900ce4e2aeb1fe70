"""zarr.json of a checkpoint: the metadata of every array, and under attributes["gangline"] what zarr does not know.

It is the commit: put last and in one act, so a checkpoint is whole if and only if it is there. It carries a checksum of
itself, for nothing else would notice a flipped digit in a learning rate.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fastcrc.crc32 import iscsi as crc32c

from gangline.errors import BadCheckpoint
from gangline.shard import Registry
from gangline_ckpt_zarr.format import cuts
from gangline_ckpt_zarr.format.cells import Files, Run
from gangline_ckpt_zarr.format.grid import stored_dtype
from gangline_ckpt_zarr.format.seal import CHECKSUM, TRAILER, seal_start

NAME = "zarr.json"
FORMAT = 1
_WRITE_ID = re.compile("[0-9a-f]{8}")
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


@dataclass(frozen=True)
class Meta:
    """What zarr.json says."""

    sealed: ClassVar[bool] = True  # whether cells have seals

    document: dict[str, Any]
    registry: Registry
    files: Files
    write_id: str

    def path(self, rank: int) -> str:
        """The file of a rank, in the checkpoint's directory."""
        return data_path(self.write_id, rank)

    @property
    def trailer(self) -> int:
        """Bytes behind each cell: its checksum, and its seal where it has one."""
        return TRAILER if self.sealed else CHECKSUM

    def seal_start(self, run: Run) -> int | None:
        """What the seals of a run's cells start from; None where they have none."""
        return seal_start(self.write_id, run.name, run.box.offset) if self.sealed else None

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


def write(registry: Registry, files: Files, document: dict[str, Any], write_id: str) -> bytes:
    """The content of zarr.json."""
    arrays = {
        name: array_metadata(layout.shape, layout.dtype, files.chunk(name)) for name, layout in registry.layouts.items()
    }
    ours: dict[str, Any] = {
        "format": FORMAT,
        "document": document,
        "write_id": write_id,
        "layout": cuts.to_json(registry),
    }
    return root(arrays, ours)


def root(arrays: dict[str, dict[str, Any]], ours: dict[str, Any]) -> bytes:
    """A root group with these arrays in its consolidated metadata."""
    groups = {"/".join(parts[:end]) for parts in (name.split("/") for name in arrays) for end in range(1, len(parts))}
    nodes: dict[str, Any] = {
        name: {"zarr_format": 3, "node_type": "group", "attributes": {}} for name in sorted(groups)
    }
    content = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"gangline": ours},
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": nodes | arrays},
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


def read(content: bytes, file: str) -> Meta:
    """What zarr.json says. Raises BadCheckpoint where it is not what was written."""
    try:
        found = json.loads(content)
        ours = found["attributes"]["gangline"]
        if ours["checksum"] != _checksum(content, ours["checksum"]):
            raise ValueError("its checksum differs")
        if ours["format"] != FORMAT:
            raise ValueError(f"it is of format {ours['format']}, and this version reads format {FORMAT}")
        nodes = found["consolidated_metadata"]["metadata"]
        arrays = {name: node for name, node in nodes.items() if node["node_type"] == "array"}
        shapes = {name: (tuple(node["shape"]), node["attributes"]["dtype"]) for name, node in arrays.items()}
        if not _WRITE_ID.fullmatch(ours["write_id"]):
            raise ValueError(f"{ours['write_id']!r} is no write id")
        registry = cuts.of_json(ours["layout"], shapes)
        if ours.get("open"):
            from gangline_ckpt_zarr.format import opened

            return opened.read(ours, registry, arrays)
        chunks = {name: tuple(node["chunk_grid"]["configuration"]["chunk_shape"]) for name, node in arrays.items()}
        return Meta(ours["document"], registry, Files(registry, chunks), ours["write_id"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadCheckpoint("every array", None, file, str(error)) from error
