"""Fingerprints of named arrays, equal under every layout.

The sum of an array, modulo 2**64, is over hashes of (element, index in the global array); ranks add their sums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comms
    from gangline.shard import Shard

ROWS = 1 << 20  # number of elements that are hashed at once


def compute_fingerprint(names: Collection[str], shards: Iterable[Shard], comms: Comms | None = None) -> str:
    """Return the fingerprint of the arrays `names`, equal on all ranks. shards: this rank's shards."""
    import torch

    names = sorted(names)
    place = {name: number for number, name in enumerate(names)}
    sums: torch.Tensor | None = None
    for shard in shards:
        if sums is None:
            sums = torch.zeros(len(names), dtype=torch.int64, device=shard.local.device)
        if shard.primary and shard.name in place:
            sums[place[shard.name]] += sum_of(shard)
    if sums is None:
        sums = torch.zeros(len(names), dtype=torch.int64, device=None if comms is None else comms.device)
    if comms is not None:
        sums = comms.world.all_reduce(sums)
    return compute_digest(dict(zip(names, sums.tolist(), strict=True)))


def compute_digest(sums: Mapping[str, int]) -> str:
    """Return the fingerprint of arrays from the sum of each array."""
    return hashlib.blake2b(json.dumps(sorted(sums.items())).encode(), digest_size=8).hexdigest()


def sum_of(shard: Shard) -> torch.Tensor:
    """Return the checksum of a shard: sum over elements (floats as float32) of the hash of value and global index."""
    import torch

    from gangline.draws import mix_bits

    local = shard.local.detach().reshape(-1, shard.local.shape[-1] if shard.local.dim() else 1)
    places = _number_rows(shard, local.device)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    step = max(1, ROWS // max(1, local.shape[1]))
    for start in range(0, len(local), step):
        rows = local[start : start + step]
        bits = rows.float().contiguous().view(torch.int32) if rows.is_floating_point() else rows
        columns = torch.arange(rows.shape[1], device=rows.device)
        total += mix_bits(bits.to(torch.int64) + mix_bits(places[start : start + step, None] + columns)).sum()
    return total


def _number_rows(shard: Shard, device: torch.device) -> torch.Tensor:
    """Return the flat global index of the first element of each row of the shard: (rows,) int64."""
    import torch

    place = torch.full((1,), shard.offset[-1] if shard.offset else 0, dtype=torch.int64, device=device)
    for dim, (offset, length) in enumerate(zip(shard.offset[:-1], shard.local.shape[:-1], strict=True)):
        stride = prod(shard.global_shape[dim + 1 :])
        along = (torch.arange(length, device=device) + offset) * stride
        place = (place[:, None] + along).reshape(-1)
    return place
