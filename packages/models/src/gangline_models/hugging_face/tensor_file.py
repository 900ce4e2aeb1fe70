"""Safetensors file format, read a few rows at a time into a small buffer, by several threads at once.

A file is 8 bytes (little-endian length of the header), the header (JSON: name -> dtype, shape, data_offsets) and the
tensors' bytes. The file is not memory-mapped: mapped pages are read one by one, and count as memory of the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.errors import UserError
from gangline.shard import get_itemsize

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 1 << 20  # maximum bytes per read, so that conversion works in the CPU cache
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_STORED_DTYPES = {dtype: stored_dtype for stored_dtype, dtype in DTYPES.items()}


def encode_header(dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with these tensors, in order, and the file offset of each tensor.

    dtype  torch name of the dtype of all tensors
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for name, shape in shapes.items():
        ends.append(ends[-1] + prod(shape) * get_itemsize(dtype))
        header[name] = {"dtype": _STORED_DTYPES[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors' bytes
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + end for name, end in zip(shapes, ends, strict=False)}


class TensorFile:
    """Open safetensors file, until `close` or the end of the context. Raises OSError for a pipe or a damaged file."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        if path.exists() and not path.is_file():  # opening a named pipe would block
            raise OSError("The path is not a regular file.")
        try:
            with safe_open(path, framework="np"):  # checks the header against the size of the file
                pass
        except SafetensorError as error:
            raise OSError(str(error)) from error
        self.path = path
        self._file = path.open("rb", buffering=0)
        size = int.from_bytes(self._file.read(8), "little")
        self._entries = json.loads(self._file.read(size))
        self._entries.pop("__metadata__", None)
        self._begin = 8 + size

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def list_names(self) -> list[str]:
        return list(self._entries)

    def get_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def get_dtype(self, name: str) -> str:
        """Return the torch name of a tensor's dtype. Raises UserError for an unsupported dtype."""
        stored_dtype = self._entries[name]["dtype"]
        if stored_dtype not in DTYPES:
            raise UserError(f"{self.path}: {name} has dtype {stored_dtype}, which is not supported.")
        return DTYPES[stored_dtype]

    def fill(self, name: str, box: tuple[slice, ...], local: torch.Tensor) -> bool:
        """Read the slice `box` of a tensor directly into `local`; return whether that was possible.

        Does nothing if `local` has another dtype or is not contiguous on the CPU, or if `box` skips rows or lacks
        columns. Raises UserError for an unsupported dtype.
        """
        shape, dtype, offset = self._locate(name)
        rows = range(*box[0].indices(shape[0])) if shape else range(1)
        if local.dtype != dtype or local.device.type != "cpu" or not local.is_contiguous() or rows.step != 1:
            return False
        if any(range(*part.indices(size)) != range(size) for part, size in zip(box[1:], shape[1:], strict=True)):
            return False
        if local.numel():
            self._read(offset + rows.start * prod(shape[1:]) * dtype.itemsize, local.detach())
        return True

    def _locate(self, name: str) -> tuple[tuple[int, ...], torch.dtype, int]:
        """Return (shape, dtype, file offset) of a tensor. Raises UserError for an unsupported dtype."""
        import torch

        begin = self._begin + self._entries[name]["data_offsets"][0]
        return self.get_shape(name), getattr(torch, self.get_dtype(name)), begin

    def iterate_blocks(self, name: str, box: tuple[slice, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the slice `box` of a tensor, a few rows at a time: (number of the first row, the rows).

        Rows are slices along the first dim: views of a buffer that the next rows overwrite. A scalar tensor is yielded
        as (0, scalar). Raises UserError for an unsupported dtype.
        """
        import torch

        shape, dtype, offset = self._locate(name)
        if not shape:
            scalar = torch.empty(1, dtype=dtype)
            self._read(offset, scalar)
            yield 0, scalar.squeeze(0)
            return
        rows = range(*box[0].indices(shape[0]))
        row_bytes = prod(shape[1:]) * dtype.itemsize
        if not rows or not row_bytes:
            return
        at_once = min(len(rows), max(1, BLOCK_BYTES // (row_bytes * rows.step)))
        buffer = torch.empty((at_once - 1) * rows.step + 1, *shape[1:], dtype=dtype)
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            block = buffer[: some[-1] - some[0] + 1]
            self._read(offset + some[0] * row_bytes, block)
            yield first, block[(slice(None, None, rows.step), *box[1:])]

    def _read(self, offset: int, into: torch.Tensor) -> None:
        import torch

        view = into.view(-1).view(torch.uint8).numpy().data
        while view:
            count = os.preadv(self._file.fileno(), [view], offset)
            if not count:
                raise UserError(f"{self.path} cannot be read.", "The file was truncated during the read.")
            view, offset = view[count:], offset + count
