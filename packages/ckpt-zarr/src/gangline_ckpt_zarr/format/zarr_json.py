"""Reader of zarr.json: zarr's metadata of every array, and gangline's metadata under attributes["gangline"].

zarr.json is the commit: it is written last and atomically, so a checkpoint is complete if and only if it exists. It
has a checksum of its own text, without which a flipped digit in a learning rate would not be detected.
"""

from __future__ import annotations

import json
import re

from gangline import BadCheckpoint
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.format import claims, cuts, native, packed
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.nodes import FORMAT, NAME, build_group_nodes, compute_root_checksum
from gangline_ckpt_zarr.stores.base import ObjectStore

_WRITE_ID = re.compile("[0-9a-f]{8}")
MOST_BYTES = 256 << 20  # maximum size of a local zarr.json: 1 kB for each of 250,000 arrays


def read_content(store: ObjectStore, path: str = NAME) -> bytes:
    """Return the bytes of a zarr.json. Raises BadCheckpoint if a local file is too long, FileNotFoundError."""
    if store.local and (there := store.size(path)) > MOST_BYTES:
        raise BadCheckpoint(
            "every array", None, f"{store.url}/{path}", f"zarr.json has {there:,} bytes, more than {MOST_BYTES:,}"
        )
    return store.read(path)


def read(content: bytes, file: str, id: CheckpointId | None = None) -> Meta:
    """Return the metadata in zarr.json. Raises BadCheckpoint if it is damaged or of a checkpoint other than `id`.

    Callers that rely on the sizes in zarr.json must first check that the data files exist; see `tiers.completeness`.
    """
    try:
        root = json.loads(content)
        claims.check_depth(root)
        ours = root["attributes"]["gangline"]
        if ours["checksum"] != compute_root_checksum(content, ours["checksum"]):
            raise ValueError("its checksum differs")
        if ours["format"] != FORMAT:
            raise ValueError(f"zarr.json has format {ours['format']}, but this version reads only format {FORMAT}")
        if not _WRITE_ID.fullmatch(ours["write_id"]):
            raise ValueError(f"the write id {ours['write_id']!r} is not 8 hex digits")
        document = claims.parse_mapping(ours["document"], "the document")
        says = CheckpointId(*claims.parse_identity(document))
        if id is not None and says != id:
            raise ValueError(f"zarr.json belongs to checkpoint {says}")
        nodes = root["consolidated_metadata"]["metadata"]
        arrays = {name: node for name, node in nodes.items() if node["node_type"] == "array"}
        shapes = {
            name: (claims.parse_shape(node["shape"], name), node["attributes"]["dtype"])
            for name, node in arrays.items()
        }
        registry = cuts.parse_registry(ours["layout"], shapes)
        meta: Meta = (native if ours.get("open") else packed).read(ours, registry, arrays)
        array_nodes = meta.build_nodes()
        if nodes != build_group_nodes(array_nodes) | array_nodes:
            raise ValueError("zarr's metadata and gangline's metadata contradict each other")
        return meta
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise BadCheckpoint("every array", None, file, _explain(error)) from error


def _explain(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    return "the JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)
