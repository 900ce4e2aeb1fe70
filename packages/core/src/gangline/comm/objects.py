"""Collectives of JSON values."""

from __future__ import annotations

import json

import torch

from gangline.comm.base import Comm


def gather_json(comm: Comm, device: torch.device, value: object) -> list:
    """Return the JSON value of every rank of the axis, in order of index. Uses two small all-gathers."""
    if comm.size == 1:
        return [value]
    content = json.dumps(value).encode()
    lengths = comm.all_gather(torch.tensor([len(content)], dtype=torch.int64, device=device)).tolist()
    padded = torch.zeros(1, max(lengths), dtype=torch.uint8, device=device)
    padded[0, : len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    rows = comm.all_gather(padded).cpu()
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]
