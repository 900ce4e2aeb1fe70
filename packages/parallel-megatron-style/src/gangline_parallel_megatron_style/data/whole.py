"""From pieces to whole arrays and back: for optimizers that need a matrix in one piece (Muon)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gangline.comm import Comm, Comms
from gangline.mesh import Mesh
from gangline.shard import Layout
from gangline_parallel_megatron_style.arrays import tp_cut
from gangline_parallel_megatron_style.data.flat import Flat


def gather(flat: Flat, name: str, pieces: Sequence[Tensor], layout: Layout, mesh: Mesh, comms: Comms) -> Tensor:
    """The whole array; of a stack, on each rank, all of the matrices that it has a part of."""
    local = _rows_gathered(flat, name, pieces)
    for number, division in enumerate(layout.divisions):
        if tp_cut(flat.buffer.group, division):
            local = _dim_gathered(local, layout, number, comms.axis("tp"))
    return local[_matrices(flat, name)] if local.dim() > 2 else local


def scatter(flat: Flat, name: str, whole: Tensor, layout: Layout, mesh: Mesh, rank: int) -> list[Tensor]:
    """This rank's pieces of what `gather` gave."""
    shape = flat.shapes[name]
    if whole.dim() > 2:
        stack = whole.new_zeros((shape[0], *whole.shape[1:]))
        stack[_matrices(flat, name)] = whole
        whole = stack
    for division in layout.divisions:
        if tp_cut(flat.buffer.group, division):
            part = mesh.coordinate(rank)["tp"] // division.every % division.parts
            bounds = division.bounds[0]
            whole = whole.narrow(division.dim, bounds[part], bounds[part + 1] - bounds[part])
    rows = whole.reshape(-1, whole.shape[-1]) if whole.dim() > 1 else whole.reshape(1, -1)
    first = _bounds(flat, name)[flat.index]
    found = []
    for piece in flat.pieces[name]:
        count = 1 if whole.dim() <= 1 else piece.tensor.numel() // whole.shape[-1]
        found.append(rows[first : first + count].reshape(piece.tensor.shape).to(piece.tensor.device))
        first += count
    return found


def _bounds(flat: Flat, name: str) -> list[int]:
    """Rows of the array on this rank before each range; rows that only other ranks of `tp` have are none."""
    shape, packing = flat.shapes[name], flat.buffer.packing
    count = torch.Size(shape[:-1]).numel()
    index = [array.name for array in packing.arrays].index(name)
    return [min(bound, count) for bound in packing.bounds(index)]


def _rows_gathered(flat: Flat, name: str, pieces: Sequence[Tensor]) -> Tensor:
    shape, bounds = flat.shapes[name], _bounds(flat, name)
    width = shape[-1] if shape else 1
    counts = [stop - start for start, stop in pairwise(bounds)]
    dtype = pieces[0].dtype if pieces else flat.choices.precision.param_dtype
    mine = torch.zeros(max(counts), width, dtype=dtype, device=flat.choices.device)
    if pieces:
        rows = torch.cat([piece.detach().reshape(-1, width) for piece in pieces])
        mine[: len(rows)] = rows
    if len(counts) == 1:
        return mine.view(shape)
    every = flat.sums.shard.all_gather(mine).view(len(counts), max(counts), width)  # type: ignore[union-attr]
    return torch.cat([part[:count] for part, count in zip(every, counts, strict=True)]).view(shape)


def _dim_gathered(local: Tensor, layout: Layout, number: int, comm: Comm) -> Tensor:
    division = layout.divisions[number]
    bounds = division.bounds[0]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    mine = local.new_zeros((max(sizes), *local.movedim(division.dim, 0).shape[1:]))
    mine[: local.shape[division.dim]] = local.movedim(division.dim, 0)
    every = comm.all_gather(mine).view(comm.size, *mine.shape)  # type: ignore[union-attr]
    parts = [every[part * division.every][:size] for part, size in enumerate(sizes)]
    return torch.cat(parts).movedim(0, division.dim).contiguous()


def _matrices(flat: Flat, name: str) -> slice:
    """Which matrices of the stack on this rank its pieces are parts of."""
    shape, bounds = flat.shapes[name], _bounds(flat, name)
    per = torch.Size(shape[1:-1]).numel()
    first, last = bounds[flat.index], bounds[flat.index + 1]
    return slice(first // per, -(-last // per)) if last > first else slice(0, 0)
