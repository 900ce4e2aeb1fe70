"""Writer of a model as a Hugging Face directory: config.json, safetensors files, and their index.

Shapes are known from the model's tree, so the layout of every file is known before the first tensor is read. At most
one tensor is in memory, except for parameters that are joined in one Hugging Face tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gangline.errors import UserError
from gangline.plan import Plan
from gangline.shard import get_itemsize
from gangline_models.hugging_face.names import HFTensor, find_hf_tensors
from gangline_models.hugging_face.tensor_file import encode_header
from gangline_models.hugging_face.tensors import INDEX, ONE_FILE

if TYPE_CHECKING:
    import torch

DTYPES = ("float64", "float32", "bfloat16", "float16")
MAX_SHARD_BYTES = 5_000_000_000
BLOCK_BYTES = 8 << 20  # maximum bytes to convert at a time


@dataclass
class _Slot:
    hf_tensor: HFTensor
    nbytes: int
    file: str = ""
    offset: int = 0  # offset in the file, in bytes


def export(
    directory: str | Path,
    arrays: Iterable[tuple[str, torch.Tensor]],
    *,
    plan: Plan,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write `directory` completely or not at all.

    arrays  (name, unsharded tensor) in any order, each name of `shapes` once; read one at a time. The next tensor may
            reuse the memory
    shapes  global shape of every parameter by name (`gangline.model.tree.get_parameter_shapes`)
    config  the content of config.json
    beside  additional files such as tokenizer.json: name -> content
    Raises UserError if the directory exists or cannot be written, ValueError if `arrays` do not match `shapes`.
    """
    target = Path(directory).expanduser()
    if target.exists():
        raise UserError(f"{target} already exists.", "gangline export does not overwrite.", "Name another directory.")
    slots = {
        name: [
            _Slot(hf_tensor, prod(hf_tensor.shape) * get_itemsize(dtype))
            for hf_tensor in find_hf_tensors(plan, name, shape)
        ]
        for name, shape in shapes.items()
    }
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, arrays, slots, dtype, max_shard_bytes)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, content in (beside or {}).items():
            (partial / name).write_bytes(content)
        partial.rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written.", error.strerror or str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    folder: Path,
    arrays: Iterable[tuple[str, torch.Tensor]],
    slots: dict[str, list[_Slot]],
    dtype: str,
    max_shard_bytes: int,
) -> None:
    import torch

    every = [slot for group in slots.values() for slot in group]
    place = {slot.hf_tensor.name: slot for slot in every}
    files, joined = _lay_out(list(place.values()), max_shard_bytes), _Joined(every)
    with ExitStack() as stack:
        handles = {
            name: _begin(stack.enter_context((folder / name).open("wb")), content, dtype)
            for name, content in files.items()
        }
        for name, tensor in arrays:
            if name not in slots:
                raise ValueError(f"array {name!r} is not a parameter of the model, or was passed twice")
            for slot in slots.pop(name):
                part = tensor if slot.hf_tensor.index is None else tensor[slot.hf_tensor.index]
                part = part.mT if slot.hf_tensor.transpose else part
                whole = joined.take(slot.hf_tensor, part.detach())
                if whole is None:
                    continue
                if tuple(whole.shape) != slot.hf_tensor.shape:
                    raise ValueError(
                        f"array {name!r} results in shape {tuple(whole.shape)}, expected {slot.hf_tensor.shape}"
                    )
                slot = place[slot.hf_tensor.name]
                file = handles[slot.file]
                file.seek(slot.offset)
                for rows in _split_blocks(whole):
                    raw = rows.to("cpu", getattr(torch, dtype)).contiguous().reshape(-1).view(torch.uint8)
                    file.write(raw.numpy().data)
        if slots:
            raise ValueError(f"arrays are missing for {', '.join(slots)}")
        for file in handles.values():
            file.flush()
            os.fsync(file.fileno())
    if len(files) > 1:
        where = {slot.hf_tensor.name: name for name, content in files.items() for slot in content}
        size = sum(slot.nbytes for content in files.values() for slot in content)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class _Joined:
    """Buffer of parameters that a Hugging Face tensor joins, kept until all parameters of the tensor have arrived."""

    def __init__(self, slots: Iterable[_Slot]) -> None:
        self._missing = Counter(slot.hf_tensor.name for slot in slots if slot.hf_tensor.first is not None)
        self._received: dict[str, dict[int, torch.Tensor]] = {}

    def take(self, hf_tensor: HFTensor, part: torch.Tensor) -> torch.Tensor | None:
        """Return the joined tensor when its last part arrives; None before."""
        import torch

        if hf_tensor.first is None:
            return part
        received = self._received.setdefault(hf_tensor.name, {})
        self._missing[hf_tensor.name] -= 1
        if self._missing[hf_tensor.name]:
            received[hf_tensor.first] = part.clone()  # the next array may reuse the memory
            return None
        received[hf_tensor.first] = part
        del self._received[hf_tensor.name]
        parts = [received[first] for first in sorted(received)]
        if hf_tensor.every > 1:
            return torch.stack(parts, dim=hf_tensor.dim + 1).flatten(hf_tensor.dim, hf_tensor.dim + 1)
        return torch.cat(parts, dim=hf_tensor.dim)


def _split_blocks(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Split a tensor into blocks of rows, so that conversion and transposition need little extra memory."""
    if not tensor.dim() or not tensor.numel():
        return [tensor]
    return tensor.split(max(1, len(tensor) * BLOCK_BYTES // tensor.nbytes))


def _lay_out(slots: list[_Slot], max_shard_bytes: int) -> dict[str, list[_Slot]]:
    """Return file name -> tensors: files are filled in order; a tensor larger than the limit gets its own file."""
    groups: list[list[_Slot]] = [[]]
    file_bytes = 0
    for slot in slots:
        if groups[-1] and file_bytes + slot.nbytes > max_shard_bytes:
            groups.append([])
            file_bytes = 0
        groups[-1].append(slot)
        file_bytes += slot.nbytes
    total = len(groups)
    names = [ONE_FILE] if total == 1 else [f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    for name, group in zip(names, groups, strict=True):
        for slot in group:
            slot.file = name
    return dict(zip(names, groups, strict=True))


def _begin(file: BinaryIO, slots: list[_Slot], dtype: str) -> BinaryIO:
    """Write the header of a file and set the offset of each slot."""
    header, offsets = encode_header(dtype, {slot.hf_tensor.name: slot.hf_tensor.shape for slot in slots})
    file.write(header)
    for slot in slots:
        slot.offset = offsets[slot.hf_tensor.name]
    return file
