"""zarr v3 metadata of arrays and groups, and the root's zarr.json with a checksum of its own text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gangline_ckpt_zarr.format.checksum import CODEC, checksum_of
from gangline_ckpt_zarr.format.dtypes import map_dtype

NAME = "zarr.json"
FORMAT = 1  # version of the content of attributes["gangline"]
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, CODEC]


def build_array_node(shape: tuple[int, ...], dtype: str, chunk: tuple[int, ...]) -> dict[str, Any]:
    """Return the zarr v3 metadata of one array."""
    stored_dtype = map_dtype(dtype)
    zero = False if stored_dtype == "bool" else 0.0 if stored_dtype.startswith("float") else 0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": stored_dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero,
        "codecs": CODECS if stored_dtype not in ("bool", "int8", "uint8") else [{"name": "bytes"}, CODECS[1]],
        "attributes": {"dtype": dtype},
        "storage_transformers": [],
    }


def build_group_nodes(arrays: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the zarr v3 metadata of every group that contains these arrays."""
    names = {"/".join(parts[:end]) for parts in (name.split("/") for name in arrays) for end in range(1, len(parts))}
    return {name: {"zarr_format": 3, "node_type": "group", "attributes": {}} for name in sorted(names)}


def encode_root(arrays: dict[str, dict[str, Any]], ours: dict[str, Any]) -> bytes:
    """Return the root's zarr.json: a group with consolidated metadata, attributes `ours` and a checksum of the text."""
    content = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"gangline": ours},
        "consolidated_metadata": {
            "kind": "inline",
            "must_understand": False,
            "metadata": build_group_nodes(arrays) | arrays,
        },
    }
    ours.pop("checksum", None)
    ours["checksum"] = 0  # last, where `_encode_signature` expects it
    text = json.dumps(content, separators=(",", ":")).encode()
    return text.replace(_encode_signature(0), _encode_signature(checksum_of(text)))


def _encode_signature(checksum: int) -> bytes:
    """Return the text around the checksum: its position as the last attribute makes the text unique."""
    return b'"checksum":%d}},"consolidated_metadata":' % checksum


def compute_root_checksum(content: bytes, stored: int) -> int:
    """Return the checksum of the content with 0 for `stored`. Raises ValueError if `stored` is not in its position."""
    if content.count(_encode_signature(stored)) != 1:
        raise ValueError("the checksum is missing or misplaced")
    return checksum_of(content.replace(_encode_signature(stored), _encode_signature(0)))
