"""Storage of a parameter in `rows`: this rank's rows as leaf tensors, gathered to the full parameter for compute.

On a fold, "full parameter" means the part of the parameter for this rank's position on the fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from gangline.comm.base import Comm
from gangline.comm.ordered import sum_rows
from gangline.mesh import Mesh
from gangline.shard import Box, Division, Layout, Registry, name_model_array


def split_evenly(length: int, parts: int) -> tuple[int, ...]:
    """Return the bounds that split a length into `parts` parts, as evenly as possible."""
    return tuple(i * length // parts for i in range(parts + 1))


def build_layout(shape: tuple[int, ...], dtype: str, mesh: Mesh, cut: tuple[int, int] | None) -> Layout:
    """Return the layout of an array that is sharded by rows over `dp_shard`.

    cut: (dim, fold size) of an array on a fold, which is split along this dim over the fold, then by rows over the
    remaining ranks; None without a fold.
    """
    divisions: tuple[Division, ...] = ()
    part_shape, size = list(shape), 1
    if cut is not None:
        dim, size = cut
        divisions = (Division(("dp_shard",), (split_evenly(shape[dim], size),), dim),)
        part_shape[dim] //= size
    if len(shape) > 1:
        rest = split_evenly(prod(part_shape[:-1]), mesh.size("dp_shard") // size)
        divisions += (Division(("dp_shard",), (rest,), rows=True, every=size),)
    return Layout(shape, dtype, divisions)


class RowsOf:
    """One parameter on this rank. comm: the ranks that share its rows; on a fold, those of `fold_rest`."""

    def __init__(self, name: str, registry: Registry, rank: int, comm: Comm, dtype: torch.dtype, trained: bool) -> None:
        self.name, self.comm, self.dtype, self.trained = name, comm, dtype, trained
        layout = registry[name_model_array(name)]
        self.shape = layout.shape
        rank_boxes = registry.list_rank_boxes(name_model_array(name), rank)
        self.boxes = [box for box, _ in rank_boxes]
        self.primary = [primary for _, primary in rank_boxes]
        self.place = _place_on_fold(layout, registry.mesh, rank)
        self.cut = len(self.shape) > 1
        self.bounds = layout.divisions[-1].bounds[0] if self.cut else (0, 1)
        self.tensors = [torch.empty(box.shape, dtype=dtype).requires_grad_(trained) for box in self.boxes]

    @property
    def width(self) -> int:
        return self.place.shape[-1]

    def gather_rows(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the full parameter, gathered from the rows of all ranks."""
        if not self.cut:
            return pieces[0].detach().clone()
        counts = [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        own_rows = torch.zeros(max(counts), self.width, dtype=pieces[0].dtype if pieces else self.dtype)
        if pieces:
            rows = torch.cat([piece.detach().reshape(-1, self.width) for piece in pieces])
            own_rows[: len(rows)] = rows
        every = self.comm.all_gather(own_rows).view(len(counts), max(counts), self.width)
        return torch.cat([part[:count] for part, count in zip(every, counts, strict=True)]).view(self.place.shape)

    def reduce_rows(self, gradient: Tensor) -> list[Tensor]:
        """Return this rank's shards of a full gradient, summed over the ranks in rank order."""
        if not self.cut:
            return [self.comm.all_reduce(gradient.clone())]
        counts = [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        own_count = counts[self.comm.index]
        rows = gradient.reshape(-1, self.width).contiguous()
        parts = self.comm.all_to_all(rows, counts, [own_count] * self.comm.size)
        return self.split(sum_rows(parts.view(self.comm.size, own_count, self.width)))

    def split(self, rows: Tensor) -> list[Tensor]:
        """Return this rank's rows, split into tensors of the shapes of its boxes."""
        sizes = [box.size // self.width for box in self.boxes]
        return [part.view(box.shape) for part, box in zip(rows.split(sizes), self.boxes, strict=True)] if sizes else []


def _place_on_fold(layout: Layout, mesh: Mesh, rank: int) -> Box:
    """Return the box of an array for this rank's position on the fold."""
    first = layout.divisions[0] if layout.divisions else None
    if first is None or first.rows:
        return Box((0,) * len(layout.shape), layout.shape)
    index = mesh.coordinate(rank)["dp_shard"] % first.parts
    start, stop = first.bounds[0][index : index + 2]
    offset, shape = [0] * len(layout.shape), list(layout.shape)
    offset[first.dim], shape[first.dim] = start, stop - start
    return Box(tuple(offset), tuple(shape))
