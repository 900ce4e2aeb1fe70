"""Whole matrices for optimizers that need them (Muon), each on one rank instead of on all.

The parts of a batch of matrices are sent to the matrices' owners in one all-to-all, each owner maps its matrices one by
one, and the parts of the results are sent back in another. So a matrix is mapped once, and to the bits that every rank
that holds it would have got by itself.

Owners are a function of the registry alone. A matrix (m, n) costs m · n · min(m, n), as the products of a Newton-Schulz
iteration do; the most expensive are assigned first, each to the least loaded of its holders, or to the least loaded of
all ranks where its holders have their share already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from gangline.comm.base import Comm
from gangline.runtime import ShardedParam
from gangline.shard import Box, Registry, model_array

Pieces = Sequence[Tensor]
Batch = dict[str, Pieces]
_Move = tuple["_Matrix", "_Part", int, int]
_View = Callable[["_Matrix", "_Part"], Tensor]
LIMIT = 1 << 28  # bytes of matrices that are under way together, if every rank then has one to map


@dataclass
class _Part:
    """A part of a matrix: the primary box it is in, its own box, and which ranks have it, by index of the comm."""

    of: Box
    box: Box
    holders: list[int]


@dataclass
class _Matrix:
    """One matrix of the parameter `name`; `box` holds it."""

    name: str
    box: Box
    parts: list[_Part]

    @property
    def cost(self) -> int:
        return prod(self.box.shape) * min(self.box.shape[-2:])

    def view(self, wholes: dict[int, Tensor], part: _Part) -> Tensor:
        """The part, (rows, columns), in the whole."""
        return wholes[id(self)][part.box.within(self.box)[-2:]]


@dataclass
class _Plan:
    """What a rank does for a batch: the matrices it maps, and the moves, (matrix, part, from, to), it takes part in."""

    own: list[_Matrix]
    gathers: list[_Move]
    scatters: list[_Move]


class Matrices:
    """The matrices of a runtime's parameters. `comm`: the ranks that hold the same parameters, those of a stage."""

    def __init__(
        self, registry: Registry, comm: Comm, parameters: Sequence[ShardedParam], device: torch.device
    ) -> None:
        self.registry, self.comm, self.device = registry, comm, device
        self.places = {p.name: [piece.shard.box for piece in p.pieces] for p in parameters}
        self._matrices: dict[str, list[_Matrix]] = {}
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def map(
        self, function: Callable[[Tensor], Tensor], given: Iterable[tuple[str, Pieces]]
    ) -> Iterator[tuple[str, Pieces]]:
        """What `Runtime.map_matrices` does."""
        batch: dict[str, Pieces] = {}
        size = count = 0
        for name, pieces in given:
            batch[name] = pieces
            size += self.registry[model_array(name)].nbytes
            count += len(self._of(name))
            if size >= LIMIT and count >= self.comm.size:
                yield from self._mapped(function, batch)
                batch, size, count = {}, 0, 0
        if batch:
            yield from self._mapped(function, batch)

    @torch.no_grad()
    def _mapped(self, function: Callable[[Tensor], Tensor], batch: Batch) -> Iterator[tuple[str, Pieces]]:
        plan = self._plan(tuple(batch))
        dtype = getattr(torch, self.registry[model_array(next(iter(batch)))].dtype)
        wholes = {id(m): torch.empty(m.box.shape[-2:], dtype=dtype, device=self.device) for m in plan.own}
        self._move(plan.gathers, dtype, lambda m, part: self._piece(m, part, batch), lambda m, p: m.view(wholes, p))
        for matrix in plan.own:
            wholes[id(matrix)] = function(wholes[id(matrix)])
        made: Batch = {name: [torch.empty_like(piece) for piece in pieces] for name, pieces in batch.items()}
        self._move(plan.scatters, dtype, lambda m, p: m.view(wholes, p), lambda m, part: self._piece(m, part, made))
        yield from made.items()

    def _move(self, moves: list[_Move], dtype: torch.dtype, taken: _View, put: _View) -> None:
        """Copy parts from rank to rank in one all-to-all; what stays on this rank is copied as it is."""
        me, size = self.comm.index, self.comm.size
        out: list[list[Tensor]] = [[] for _ in range(size)]
        into: list[list[Tensor]] = [[] for _ in range(size)]
        for matrix, part, source, target in moves:
            if source == target:
                put(matrix, part).copy_(taken(matrix, part))
            elif source == me:
                out[target].append(taken(matrix, part).reshape(-1).to(self.device))  # pieces may be offloaded
            else:
                into[source].append(put(matrix, part))
        if size == 1:
            return
        empty = torch.empty(0, dtype=dtype, device=self.device)
        leaving, arriving = ([sum(x.numel() for x in row) for row in rows] for rows in (out, into))
        came = self.comm.all_to_all(torch.cat([empty, *(x for row in out for x in row)]), leaving, arriving)
        targets = [x for row in into for x in row]
        values = came.split([x.numel() for x in targets])
        for there, value in zip(targets, values, strict=True):
            there.copy_(value.view(there.shape))

    def _piece(self, matrix: _Matrix, part: _Part, pieces: Batch) -> Tensor:
        """The part, (rows, columns), in this rank's piece."""
        place = self.places[matrix.name].index(part.of)
        found = pieces[matrix.name][place][part.box.within(part.of)]
        return found.view(found.shape[-2:])

    # --- owners ------------------------------------------------------------------------------------------------------

    def _of(self, name: str) -> list[_Matrix]:
        if name not in self._matrices:
            indices = {rank: index for index, rank in enumerate(self.comm.ranks)}
            layout = self.registry[model_array(name)]
            lead, shape = layout.shape[:-2], layout.shape[-2:]
            found = {
                at: _Matrix(name, Box((*at, 0, 0), (*(1 for _ in at), *shape)), [])
                for at in product(*(range(length) for length in lead))
            }
            for box, ranks in self.registry.held(model_array(name)):
                holders = sorted(indices[rank] for rank in ranks if rank in indices)
                lengths = zip(box.offset[:-2], box.shape[:-2], strict=True)
                for at in product(*(range(first, first + length) for first, length in lengths)):
                    part = Box((*at, *box.offset[-2:]), (*(1 for _ in at), *box.shape[-2:]))
                    found[at].parts.append(_Part(box, part, holders))
            self._matrices[name] = list(found.values())
        return self._matrices[name]

    def _plan(self, names: tuple[str, ...]) -> _Plan:
        """The matrices of these parameters that this rank maps, and the moves that it takes part in."""
        if names not in self._plans:
            matrices = [matrix for name in names for matrix in self._of(name)]
            owners, me, plan = owners_of(matrices, self.comm.size), self.comm.index, _Plan([], [], [])
            for matrix, owner in zip(matrices, owners, strict=True):
                if owner == me:
                    plan.own.append(matrix)
                for part in matrix.parts:
                    source = owner if owner in part.holders else part.holders[owner % len(part.holders)]
                    if me in (source, owner):
                        plan.gathers.append((matrix, part, source, owner))
                    plan.scatters += [(matrix, part, owner, rank) for rank in part.holders if me in (owner, rank)]
            self._plans[names] = plan
        return self._plans[names]


def owners_of(matrices: Sequence[_Matrix], ranks: int) -> list[int]:
    """The rank of each matrix."""
    share = sum(matrix.cost for matrix in matrices) / ranks
    load, owners = [0] * ranks, [0] * len(matrices)
    for number, matrix in sorted(enumerate(matrices), key=lambda item: -item[1].cost):
        holders = {holder for part in matrix.parts for holder in part.holders}
        free = [rank for rank in holders if load[rank] + matrix.cost <= share]
        owners[number] = min(free or range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[number]] += matrix.cost
    return owners
