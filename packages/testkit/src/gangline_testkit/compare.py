"""Assemble full arrays from the shards of all ranks, and compare arrays; messages name the position of a difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gangline.runtime import MatrixId

Held = tuple[str, tuple[int, ...], Tensor]  # shard of an array: name, offset, values
Clipped = tuple[float, list[Held], list[Held]]  # norm that `clip` returned, gradients before and after `clip`


def assemble(per_rank: Sequence[Iterable[Held]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return every array of `shapes` in full, assembled from the boxes on the ranks.

    Raises AssertionError if an element is on no rank, or if two ranks hold different bits of one element.
    """
    whole: dict[str, Tensor] = {}
    coverage: dict[str, Tensor] = {}
    for rank, pieces in enumerate(per_rank):
        for name, offset, local in pieces:
            assert name in shapes, f"rank {rank} holds the array {name}, which is not in the registry"
            place = tuple(slice(start, start + length) for start, length in zip(offset, local.shape, strict=True))
            if name not in whole:
                whole[name] = torch.zeros(shapes[name], dtype=local.dtype)
                coverage[name] = torch.zeros(shapes[name], dtype=torch.bool)
            assert all(p.stop <= n for p, n in zip(place, shapes[name], strict=True)), (
                f"rank {rank} holds {name}{list(place)}, which is outside of the array's shape {shapes[name]}"
            )
            before, overlap = whole[name][place], coverage[name][place]
            same = (
                (before == local) | (before.isnan() & local.isnan()) if local.is_floating_point() else before == local
            )
            assert bool((same | ~overlap).all()), f"rank {rank} holds other bits of {name} than lower ranks"
            whole[name][place] = local
            coverage[name][place] = True
    for name in shapes:
        missing = int((~coverage[name]).sum()) if name in coverage else "all"
        assert not missing, f"{missing} elements of {name} are on no rank"
    return whole


def close(what: str, got: Tensor, want: Tensor, relative: float) -> None:
    """Assert that elements differ by at most `relative` times the largest magnitude of `want`; 0: bit-identical."""
    assert got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.numel() == 0:
        return
    if relative == 0:
        assert got.dtype == want.dtype, f"{what} has dtype {got.dtype}, expected {want.dtype}"
        differ = int((got != want).sum())
        assert differ == 0, f"{what}: {differ} of {want.numel()} elements are not bit-identical"
        return
    difference = (got.double() - want.double()).abs()
    assert not bool(difference.isnan().any()), f"{what} contains values that are not finite"
    allowed = relative * float(want.double().abs().max())
    place = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    assert float(difference.max()) <= allowed, (
        f"{what}{list(place)} is {float(got[place])!r}, expected {float(want[place])!r}; "
        f"difference {float(difference.max()):.3g}, allowed {allowed:.3g}"
    )


def compare_all(what: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], relative: float) -> None:
    """Assert that both mappings have equal names, and that the arrays of each name are `close`."""
    assert set(got) == set(want), f"{what}: arrays in only one of the two results: {sorted(set(got) ^ set(want))}"
    for name in want:
        close(f"{what} {name}", got[name], want[name], relative)


def assert_number_close(what: str, got: float, want: float, relative: float) -> None:
    """Assert that a number differs from `want` by at most `relative` times `want`; 0: equal."""
    apart = abs(got - want)
    assert apart <= relative * abs(want), f"{what} is {got!r}, expected {want!r}"


def compare_clipped(
    per_rank: Sequence[Clipped], shapes: Mapping[str, tuple[int, ...]], limit: float, what: str
) -> None:
    """Assert that `clip` returned the norm before clipping, and scaled the gradients to at most the norm `limit`."""
    before = assemble([pieces for _, pieces, _ in per_rank], shapes)
    after = assemble([pieces for _, _, pieces in per_rank], shapes)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in before.values()))
    for clipped, _, _ in per_rank:
        assert_number_close(what, clipped, norm, 1e-12)
    factor = min(limit / norm, 1.0)
    scaled = {name: gradient * factor for name, gradient in before.items()}
    compare_all("clipped gradient", after, scaled, 1e-4 if factor < 1 else 0)


def check_mapped_once(
    answers: Sequence[tuple[list[Held], list[MatrixId], dict[MatrixId, int]]], want: Mapping[str, Tensor]
) -> None:
    """Assert that each matrix was mapped once, on its owner, and that the result is bit-identical to one process.

    answers: results of `strategy_ranks.map_matrices` on each rank; want: result of `expect_mapped`.
    """
    shapes = {name: tuple(array.shape) for name, array in want.items()}
    arrays = assemble([pieces for pieces, _, _ in answers], shapes)
    compare_all("mapped", arrays, want, 0)
    matrices = sorted((name, index) for name, shape in shapes.items() for index in range(math.prod(shape[:-2])))
    mapped = sorted(tuple(id) for _, ids, _ in answers for id in ids)
    assert mapped == matrices, f"the ranks mapped the matrices {mapped}, expected {matrices}"
    for rank, (_, ids, owners) in enumerate(answers):
        assert owners == answers[0][2], f"`find_matrix_owners` returns other owners on rank {rank} than on rank 0"
        for id in ids:
            assert owners.get(id) == rank, (
                f"rank {rank} mapped {id}, and `find_matrix_owners` returns the owner {owners.get(id)}"
            )
