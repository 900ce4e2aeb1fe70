"""Checks of a Comm that a part wraps: each operation must return the results of the bare Comm."""

from __future__ import annotations

from itertools import combinations

import torch

from gangline.comm.base import Comm, Comms
from gangline.config.schema import PartConfig, Run
from gangline.mesh import Mesh
from gangline.plan import Fold
from gangline_testkit import rank

MESHES = ({"dp_shard": 2}, {"tp": 2})


def check_traffic(config: PartConfig, run: Run) -> None:
    """Check that `wrap` changes no rank, axis, store or result of an operation. Raises AssertionError if it does."""
    for sizes in MESHES:
        inner = rank.make_comms(Mesh.of(sizes), True)
        wrapped = config.wrap(run, inner)
        assert isinstance(wrapped, Comms), f"`wrap` must return Comms, and returned {type(wrapped).__name__}"
        for name in ("rank", "device"):
            assert getattr(wrapped, name) == getattr(inner, name), f"`wrap` changed the attribute {name} of Comms"
        key = f"wrapped/{rank.index}/{next(iter(sizes))}"
        wrapped.store.set(key, b"carried")
        assert inner.store.get(key) == b"carried", (
            "a key set in the store of the wrapped Comms is missing in the store of the bare Comms"
        )
        fold = Fold("lanes", 2, tuple(sizes))
        pairs = [(wrapped.get_comm(*axes), inner.get_comm(*axes)) for axes in combinations(("dp_shard", "tp"), 1)]
        pairs += [(wrapped.world, inner.world), (wrapped.fold(fold), inner.fold(fold))]
        pairs += [(wrapped.fold_rest(fold), inner.fold_rest(fold))]
        for comm, bare in pairs:
            _compare_comms(comm, bare)


def _compare_comms(comm: Comm, bare: Comm) -> None:
    for name in ("axis", "size", "index", "ranks"):
        ours, theirs = getattr(comm, name), getattr(bare, name)
        assert ours == theirs, f"{name} of the wrapped Comm over {bare.axis} is {ours}, expected {theirs}"
    n = bare.size
    x = torch.arange(4.0 * n, dtype=torch.float64).add(10 * bare.index + 1).view(2 * n, 2)
    for prefix in ("", "start_"):
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            _assert_equal(name, _call(comm, prefix + name, x), _call(bare, prefix + name, x))
        _assert_equal(
            "broadcast", _call(comm, f"{prefix}broadcast", x, n - 1), _call(bare, f"{prefix}broadcast", x, n - 1)
        )
        received = [[torch.empty_like(x) for _ in range(n)] for _ in range(2)]
        for one, into in zip((comm, bare), received, strict=True):
            sends, recvs = [(x, peer) for peer in range(n)], [(y, peer) for peer, y in enumerate(into)]
            getattr(one, f"{prefix}exchange")(sends, recvs) if not prefix else one.start_exchange(sends, recvs).wait()
        for ours, theirs in zip(*received, strict=True):
            _assert_equal("exchange", ours, theirs)
    comm.barrier()


def _call(comm: Comm, name: str, x: torch.Tensor, *more: int) -> torch.Tensor:
    output = getattr(comm, name)(x.clone(), *more)
    return output.wait() if name.startswith("start_") else output


def _assert_equal(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.equal(theirs), (
        f"{name} of the wrapped Comm returns {ours.flatten()[:4].tolist()}..., "
        f"expected {theirs.flatten()[:4].tolist()}..."
    )
