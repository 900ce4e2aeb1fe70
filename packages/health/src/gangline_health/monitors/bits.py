"""Checksums of tensors: sums of their words modulo 2^64, which a flipped bit changes (Fletcher's idea)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from gangline.shard import is_of_model

if TYPE_CHECKING:
    from gangline.runtime import Runtime
    from gangline.shard import Shard

CHUNK = 1 << 22  # words that are widened to 64 bits at once

Piece = tuple[str, tuple[int, ...], torch.Tensor]  # (name, offset in the global array, this rank's box of it)


def list_weights(runtime: Runtime) -> list[Piece]:
    """Return the boxes of the model's weights that this rank holds."""
    return _sort((shard.name, shard.offset, shard.local) for shard in runtime.shards())


def list_gradients(runtime: Runtime) -> list[Piece]:
    """Return the boxes of gradients that this rank holds, of trained parameters."""
    pieces = [piece for parameter in runtime.parameters() for piece in parameter.pieces]
    return _sort((p.shard.name, p.shard.offset, p.tensor.grad) for p in pieces if p.tensor.grad is not None)


def _sort(pieces: Iterable[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: piece[:2])


def hash_boxes(pieces: Sequence[Piece]) -> int:
    """Return a hash of which boxes these are, 64 bits; 0 for an empty list."""
    boxes = [(name, offset, tuple(box.shape)) for name, offset, box in pieces]
    digest = hashlib.blake2b(repr(boxes).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) if boxes else 0


def compute_fingerprint(pieces: Sequence[Piece]) -> tuple[int, int, int]:
    """Return (hash of which boxes these are, sum of their words, sum weighted by position)."""
    sums: dict[torch.device, torch.Tensor] = {}  # each box is summed on its own device
    for number, (_, _, box) in enumerate(pieces):
        term = (2 * number + 1) * sum_words(box)  # an odd factor loses no bit modulo 2^64
        sums[box.device] = sums[box.device] + term if box.device in sums else term
    total = sum((each.cpu() for each in sums.values()), torch.zeros(2, dtype=torch.int64))
    return hash_boxes(pieces), int(total[0]), int(total[1])


def sum_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's words, plain and weighted by position: (2,) int64 on its device."""
    bits = view_words(tensor)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for at in range(0, bits.numel(), CHUNK):
        part = bits[at : at + CHUNK].to(torch.int64)
        place = torch.arange(at + 1, at + 1 + part.numel(), dtype=torch.int64, device=tensor.device)
        sums[0] += part.sum()
        sums[1] += (part * place).sum()
    return sums


def sum_arrays(runtime: Runtime, device: torch.device) -> tuple[list[str], torch.Tensor]:
    """Return (the model's arrays, this rank's share of the checksum of each: (arrays,) int64).

    The sum over all ranks depends on the full array alone, not on its sharding: each word counts by its position in the
    array, and only one holder of a box counts.
    """
    checksums = {name: torch.zeros((), dtype=torch.int64) for name in sorted(runtime.registry) if is_of_model(name)}
    for shard in runtime.shards():
        if shard.primary and is_of_model(shard.name):
            checksums[shard.name] = checksums[shard.name] + _sum_placed(shard).cpu()
    return list(checksums), torch.stack(list(checksums.values())).to(device) if checksums else torch.zeros(
        0, dtype=torch.int64
    )


def _sum_placed(shard: Shard) -> torch.Tensor:
    """Return the sum of a box's words, each times twice its position in the full array plus one: 0-d int64."""
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
    """Return the bits of a tensor as integers, one for each element."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()]).reshape(-1)
