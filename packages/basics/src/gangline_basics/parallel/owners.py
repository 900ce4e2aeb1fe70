"""Assignment of matrices to ranks that map them (`gangline_basics.parallel.matrices`), from the registry. Torch-free.

The cost of a matrix (m, n) is m · n · min(m, n), like the matmuls of a Newton-Schulz iteration. The most expensive
matrices are assigned first. A matrix is assigned to the least loaded of the ranks that hold a part of it, unless the
matrix would raise the load of each of these ranks above the mean; then to the least loaded of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeVar

from gangline.runtime import MatrixId
from gangline.shard import Box, Registry, name_model_array

if TYPE_CHECKING:
    from gangline.config.schema import OptimizerConfig

LIMIT = 1 << 28  # minimum size of a batch in bytes; a batch also has at least one matrix per rank

T = TypeVar("T")


@dataclass
class MatrixPart:
    """A part of a matrix: its box `box` inside the primary box `of`, and the comm indices of the ranks that hold it."""

    of: Box
    box: Box
    holders: list[int]


@dataclass
class Matrix:
    """One matrix of the parameter `id.name`; `box` is the matrix's box in the parameter."""

    id: MatrixId
    box: Box
    parts: list[MatrixPart]

    @property
    def cost(self) -> int:
        return prod(self.box.shape) * min(self.box.shape[-2:])


def list_matrices(registry: Registry, name: str, ranks: Sequence[int]) -> list[Matrix]:
    """Return the matrices of the parameter `name`: one matrix, or all of a stack. `ranks`: global ranks of the comm."""
    indices = {rank: index for index, rank in enumerate(ranks)}
    layout = registry[name_model_array(name)]
    lead, shape = layout.shape[:-2], layout.shape[-2:]
    matrices = {
        at: Matrix(MatrixId(name, index), Box((*at, 0, 0), (*(1 for _ in at), *shape)), [])
        for index, at in enumerate(product(*(range(length) for length in lead)))
    }
    for box, held_by in registry.iterate_held(name_model_array(name)):
        holders = sorted(indices[rank] for rank in held_by if rank in indices)
        lengths = zip(box.offset[:-2], box.shape[:-2], strict=True)
        for at in product(*(range(first, first + length) for first, length in lengths)):
            part = Box((*at, *box.offset[-2:]), (*(1 for _ in at), *box.shape[-2:]))
            matrices[at].parts.append(MatrixPart(box, part, holders))
    return list(matrices.values())


def iterate_batches(items: Iterable[T], measure: Callable[[T], tuple[int, int]], ranks: int) -> Iterator[list[T]]:
    """Yield batches of parameters whose matrices are sent together. measure: item -> (bytes, matrix count)."""
    batch: list[T] = []
    size = count = 0
    for one in items:
        nbytes, matrices = measure(one)
        batch.append(one)
        size, count = size + nbytes, count + matrices
        if size >= LIMIT and count >= ranks:
            yield batch
            batch, size, count = [], 0, 0
    if batch:
        yield batch


def assign_owners(matrices: Sequence[Matrix], ranks: int) -> list[int]:
    """Return the rank that maps each matrix, as an index of the comm."""
    share = sum(matrix.cost for matrix in matrices) / ranks
    load, owners = [0] * ranks, [0] * len(matrices)
    for number, matrix in sorted(enumerate(matrices), key=lambda item: -item[1].cost):
        holders = {holder for part in matrix.parts for holder in part.holders}
        free = [rank for rank in holders if load[rank] + matrix.cost <= share]
        owners[number] = min(free or range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[number]] += matrix.cost
    return owners


def find_matrix_owners(registry: Registry, names: Sequence[str], ranks: Sequence[int]) -> dict[MatrixId, int]:
    """Return the global rank that maps each matrix of the parameters. ranks: global ranks of the parameters' stage."""
    return {
        matrix.id: ranks[owner]
        for matrices in _batch_matrices(registry, names, ranks)
        for matrix, owner in zip(matrices, assign_owners(matrices, len(ranks)), strict=True)
    }


def count_most_matrix_bytes(
    optimizer: OptimizerConfig, registry: Registry, names: Sequence[str], ranks: Sequence[int], master: int
) -> int:
    """Return the bytes that `optimizer` stores for the parameters' matrices, on the rank with the most bytes."""
    sizes = dict.fromkeys(ranks, 0)
    for id, owner in find_matrix_owners(registry, names, ranks).items():
        sizes[owner] += optimizer.count_matrix_bytes(registry[name_model_array(id.name)].shape[-2:], master=master)
    return max(sizes.values())


def list_matrix_traffic(registry: Registry, names: Sequence[str], ranks: Sequence[int]) -> list[int]:
    """Return the number of elements that `Runtime.map_matrices` sends for the parameters `names`, for each batch.

    The count sums all `ranks` (global ranks of a stage) and both all-to-alls: each part is sent to its matrix's owner,
    and the result to each holder of the part.
    """
    return [_count_moved(matrices, len(ranks)) for matrices in _batch_matrices(registry, names, ranks)]


def _batch_matrices(registry: Registry, names: Sequence[str], ranks: Sequence[int]) -> Iterator[list[Matrix]]:
    """Yield the matrices of the parameters `names`, in batches that are sent together."""
    matrices = {name: list_matrices(registry, name, ranks) for name in names}

    def measure(name: str) -> tuple[int, int]:
        return registry[name_model_array(name)].nbytes, len(matrices[name])

    for batch in iterate_batches(names, measure, len(ranks)):
        yield [matrix for name in batch for matrix in matrices[name]]


def _count_moved(matrices: Sequence[Matrix], ranks: int) -> int:
    return sum(
        prod(part.box.shape) * (len(part.holders) + (-1 if owner in part.holders else 1))
        for matrix, owner in zip(matrices, assign_owners(matrices, ranks), strict=True)
        for part in matrix.parts
    )
