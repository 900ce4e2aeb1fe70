"""Full matrices for optimizers that need them (Muon, SOAP), each on one rank instead of on all ranks.

Each matrix has one owner rank. For a batch of matrices, one all-to-all sends the ranks' parts of each matrix to its
owner. Each owner applies the optimizer's function to its matrices ("maps" them), one by one. Another all-to-all sends
the parts of the results back. So a matrix is mapped only once, and the result has the same bits on all ranks.

The registry alone determines the owners (`gangline_basics.parallel.owners`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm.base import Comm
from gangline.runtime import MatrixId, ShardedParam
from gangline.shard import Registry, name_model_array
from gangline_basics.parallel.owners import (
    Matrix,
    MatrixPart,
    assign_owners,
    find_matrix_owners,
    iterate_batches,
    list_matrices,
)

Pieces = Sequence[Tensor]
Batch = dict[str, Pieces]
_Move = tuple[Matrix, MatrixPart, int, int]
_View = Callable[[Matrix, MatrixPart], Tensor]
_Function = Callable[[Tensor, MatrixId], Tensor]


@dataclass
class _Plan:
    """A rank's work for a batch: the matrices that it maps, and its transfers (matrix, part, source, target)."""

    own: list[Matrix]
    gathers: list[_Move]
    scatters: list[_Move]


class Matrices:
    """Matrices of a runtime's parameters. `comm`: the ranks of a pipeline stage, which hold the same parameters."""

    def __init__(
        self, registry: Registry, comm: Comm, parameters: Sequence[ShardedParam], device: torch.device
    ) -> None:
        self.registry, self.comm, self.device = registry, comm, device
        self.places = {p.name: [piece.shard.box for piece in p.pieces] for p in parameters}
        self._matrices: dict[str, list[Matrix]] = {}
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def find_owners(self, names: Sequence[str]) -> dict[MatrixId, int]:
        """Return the rank that maps each matrix, as `Runtime.find_matrix_owners` defines."""
        mesh, stages = self.registry.mesh, dict[tuple[tuple[str, int], ...], list[str]]()
        for name in names:
            stages.setdefault(self.registry[name_model_array(name)].at, []).append(name)
        owners: dict[MatrixId, int] = {}
        for at, theirs in stages.items():
            ranks = [mesh.rank({**mesh.coordinate(rank), **dict(at)}) for rank in self.comm.ranks]
            owners |= find_matrix_owners(self.registry, theirs, ranks)
        return owners

    def map(self, function: _Function, pieces: Iterable[tuple[str, Pieces]]) -> Iterator[tuple[str, Pieces]]:
        """Map the matrices as `Runtime.map_matrices` defines."""

        def measure(item: tuple[str, Pieces]) -> tuple[int, int]:
            return self.registry[name_model_array(item[0])].nbytes, len(self._list_matrices(item[0]))

        for batch in iterate_batches(pieces, measure, self.comm.size):
            yield from self._map(function, dict(batch))

    @torch.no_grad()
    def _map(self, function: _Function, batch: Batch) -> Iterator[tuple[str, Pieces]]:
        plan = self._plan(tuple(batch))
        dtype = getattr(torch, self.registry[name_model_array(next(iter(batch)))].dtype)
        wholes = {id(m): torch.empty(m.box.shape[-2:], dtype=dtype, device=self.device) for m in plan.own}
        self._move(
            plan.gathers,
            dtype,
            lambda m, part: self._view_piece(m, part, batch),
            lambda m, p: _view_whole(wholes, m, p),
        )
        for matrix in plan.own:
            wholes[id(matrix)] = function(wholes[id(matrix)], matrix.id)
        outputs: Batch = {name: [torch.empty_like(piece) for piece in pieces] for name, pieces in batch.items()}
        self._move(
            plan.scatters,
            dtype,
            lambda m, p: _view_whole(wholes, m, p),
            lambda m, part: self._view_piece(m, part, outputs),
        )
        yield from outputs.items()

    def _move(self, moves: list[_Move], dtype: torch.dtype, taken: _View, put: _View) -> None:
        """Copy parts from rank to rank in one all-to-all; parts that stay on this rank are copied directly."""
        me, size = self.comm.index, self.comm.size
        out: list[list[Tensor]] = [[] for _ in range(size)]
        into: list[list[Tensor]] = [[] for _ in range(size)]
        for matrix, part, source, target in moves:
            if source == target:
                put(matrix, part).copy_(taken(matrix, part))
            elif source == me:
                # pieces may be offloaded to the host
                out[target].append(taken(matrix, part).reshape(-1).to(self.device))
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

    def _view_piece(self, matrix: Matrix, part: MatrixPart, pieces: Batch) -> Tensor:
        """Return a view of the part, (rows, columns), in this rank's piece."""
        place = self.places[matrix.id.name].index(part.of)
        region = pieces[matrix.id.name][place][part.box.slice_within(part.of)]
        return region.view(region.shape[-2:])

    # --- owners ------------------------------------------------------------------------------------------------------

    def _list_matrices(self, name: str) -> list[Matrix]:
        if name not in self._matrices:
            self._matrices[name] = list_matrices(self.registry, name, self.comm.ranks)
        return self._matrices[name]

    def _plan(self, names: tuple[str, ...]) -> _Plan:
        """Return the matrices of the parameters `names` that this rank maps, and the transfers of this rank."""
        if names not in self._plans:
            matrices = [matrix for name in names for matrix in self._list_matrices(name)]
            owners, me, plan = assign_owners(matrices, self.comm.size), self.comm.index, _Plan([], [], [])
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


def _view_whole(wholes: dict[int, Tensor], matrix: Matrix, part: MatrixPart) -> Tensor:
    """Return a view of the part, (rows, columns), in the full matrix."""
    return wholes[id(matrix)][part.box.slice_within(matrix.box)[-2:]]
