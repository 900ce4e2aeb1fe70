"""Checksums of tensors: plain and position-weighted sums of their words modulo 2^64 (as Fletcher's checksum)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from gangline.shard import is_of_model

if TYPE_CHECKING:
    from gangline.runtime import Runtime
    from gangline.shard import Shard

CHUNK = 1 << 22  # maximum number of words converted to 64 bits at once

Piece = tuple[str, tuple[int, ...], torch.Tensor]  # (array name, offset of the box in the array, this rank's box)


def list_weights(runtime: Runtime) -> list[Piece]:
    """Return the boxes of the weights that this rank holds, sorted by name and offset."""
    return _sort((shard.name, shard.offset, shard.local) for shard in runtime.shards())


def list_gradients(runtime: Runtime) -> list[Piece]:
    """Return the boxes of gradients that this rank holds, sorted by name and offset."""
    pieces = [piece for parameter in runtime.parameters() for piece in parameter.pieces]
    return _sort((p.shard.name, p.shard.offset, p.tensor.grad) for p in pieces if p.tensor.grad is not None)


def _sort(pieces: Iterable[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: piece[:2])


def hash_boxes(pieces: Sequence[Piece]) -> int:
    """Return a 64-bit hash of the names, offsets and shapes of boxes, not of their values; 0 for an empty list."""
    boxes = [(name, offset, tuple(box.shape)) for name, offset, box in pieces]
    digest = hashlib.blake2b(repr(boxes).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) if boxes else 0


def compute_fingerprint(pieces: Sequence[Piece]) -> tuple[int, int, int]:
    """Return (`hash_boxes` of the boxes, sum of the words of all boxes, sum of the words weighted by position)."""
    sums: dict[torch.device, torch.Tensor] = {}  # device -> sums: each box is summed on its device
    for number, (_, _, box) in enumerate(pieces):
        term = (2 * number + 1) * sum_words(box)  # multiplying by an odd factor loses no bit modulo 2^64
        sums[box.device] = sums[box.device] + term if box.device in sums else term
    total = sum((each.cpu() for each in sums.values()), torch.zeros(2, dtype=torch.int64))
    return hash_boxes(pieces), int(total[0]), int(total[1])


def sum_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return [sum of a tensor's words, sum weighted by position modulo 2^64]: (2,) int64 on the tensor's device."""
    bits = view_words(tensor)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for at in range(0, bits.numel(), CHUNK):
        part = bits[at : at + CHUNK].to(torch.int64)
        place = torch.arange(at + 1, at + 1 + part.numel(), dtype=torch.int64, device=tensor.device)
        sums[0] += part.sum()
        sums[1] += (part * place).sum()
    return sums


def sum_arrays(runtime: Runtime, device: torch.device) -> tuple[list[str], torch.Tensor]:
    """Return (names of the model's arrays, this rank's contribution to the checksum of each array: (arrays,) int64).

    The sum over all ranks depends only on the full array, not on its sharding: each word is weighted by its position in
    the full array, and only the primary holder of a box contributes.
    """
    checksums = {name: torch.zeros((), dtype=torch.int64) for name in sorted(runtime.registry) if is_of_model(name)}
    for shard in runtime.shards():
        if shard.primary and is_of_model(shard.name):
            checksums[shard.name] = checksums[shard.name] + _sum_placed(shard).cpu()
    return list(checksums), torch.stack(list(checksums.values())).to(device) if checksums else torch.zeros(
        0, dtype=torch.int64
    )


def _sum_placed(shard: Shard) -> torch.Tensor:
    """Return the sum of a box's words, each times 2 p + 1 for its position p in the full array: 0-d int64."""
    box, device = shard.local.detach(), shard.local.device
    if not box.dim():
        return view_words(box).to(torch.int64).sum()
    strides = [1] * box.dim()
    for dim in range(box.dim() - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shard.global_shape[dim + 1]
    row = torch.zeros((1,) * box.dim(), dtype=torch.int64, device=device)
    for dim in range(1, box.dim()):
        along = torch.arange(shard.offset[dim], shard.offset[dim] + box.shape[dim], device=device) * strides[dim]
        row = row + along.view([-1 if d == dim else 1 for d in range(box.dim())])
    total = torch.zeros((), dtype=torch.int64, device=device)
    many = max(1, CHUNK // max(1, row.numel()))
    for at in range(0, box.shape[0], many):
        part = box[at : at + many]
        first = torch.arange(shard.offset[0] + at, shard.offset[0] + at + len(part), device=device) * strides[0]
        place = row + first.view([-1] + [1] * (box.dim() - 1))
        total += (view_words(part).view(part.shape).to(torch.int64) * (2 * place + 1)).sum()
    return total


def view_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as one integer per element, 1-d; without a copy if the tensor is contiguous."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()]).reshape(-1)
