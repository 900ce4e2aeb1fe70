"""Every operation of `Comm` on real ranks over gloo, compared with the expected values."""

from __future__ import annotations

import pytest
import torch

from gangline.comm.solo import Solo
from gangline.comm.transport import connect
from gangline.mesh import Mesh
from gangline.plan import Fold
from gangline_basics.parallel import autograd
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

SIZES = [1, 2, 4]
BOTH = pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "ordered"])


def along_dp(deterministic=False):
    return rank.make_comms(Mesh.of({"dp_shard": rank.world}), deterministic).get_comm("dp_shard")


def value_of(index, shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(index), dtype=dtype)


def operations(deterministic):
    comm = along_dp(deterministic)
    n, mine = comm.size, value_of(comm.index, (comm.size * 3, 2))
    everyone = [value_of(i, (n * 3, 2)) for i in range(n)]
    total = sum(everyone)
    share = slice(comm.index * 3, comm.index * 3 + 3)
    for started in (False, True):

        def call(name, *given, started=started):
            return getattr(comm, f"start_{name}")(*given).wait() if started else getattr(comm, name)(*given)

        into = mine.clone()
        assert call("all_reduce", into) is into
        torch.testing.assert_close(into, total)
        assert call("all_reduce", mine.clone(), "max").equal(torch.stack(everyone).amax(0))
        assert call("all_reduce", mine.clone(), "min").equal(torch.stack(everyone).amin(0))
        assert call("all_gather", mine).equal(torch.cat(everyone))
        torch.testing.assert_close(call("reduce_scatter", mine), total[share])
        assert call("all_to_all", mine).equal(torch.cat([x[share] for x in everyone]))
        received = [torch.empty(n * 3, 2, dtype=mine.dtype) for _ in range(n)]
        got = call("exchange", [(mine, p) for p in range(n)], [(x, p) for p, x in enumerate(received)])
        assert all(x.equal(theirs) for x, theirs in zip(got, everyone, strict=True))
        assert got[0] is received[0]
    comm.barrier()
    return comm.index, comm.size, comm.ranks


@BOTH
@pytest.mark.parametrize("world", SIZES)
def test_every_collective_returns_expected_values(world, deterministic):
    found = get_pool(world).run(operations, deterministic)
    assert found == [(i, world, tuple(range(world))) for i in range(world)]


def uneven():
    """Send j + i rows, which may be 0, from rank i to rank j."""
    comm = along_dp()
    i, n = comm.index, comm.size
    x = torch.cat([torch.full((i + j, 2), 10.0 * i + j) for j in range(n)])
    got = comm.all_to_all(x, [i + j for j in range(n)], [j + i for j in range(n)])
    assert got.equal(torch.cat([torch.full((i + j, 2), 10.0 * j + i) for j in range(n)]))


@pytest.mark.parametrize("world", SIZES)
def test_all_to_all_supports_uneven_and_empty_splits(world):
    get_pool(world).run(uneven)


def float8():
    comm = along_dp()
    x = torch.arange(8, dtype=torch.float32).add(comm.index).to(torch.float8_e4m3fn)
    gathered = comm.all_gather(x)
    swapped = comm.all_to_all(x)
    assert gathered.dtype == swapped.dtype == x.dtype
    return gathered.float(), swapped.float()


def test_gloo_collectives_support_float8():
    (gathered, swapped), _ = get_pool(2).run(float8)
    assert gathered.tolist() == [*range(8), *range(1, 9)]
    assert swapped.tolist() == [*range(4), *range(1, 5)]


def broadcasts(deterministic):
    """Broadcast from each rank in turn, in every dtype, along an axis whose indices are not the global ranks."""
    comm = rank.make_comms(Mesh.of({"dp_shard": 2, "tp": 2}), deterministic).get_comm("dp_shard")
    for source in range(comm.size):
        for dtype in (torch.float32, torch.bfloat16, torch.uint16, torch.int32, torch.bool, torch.float8_e4m3fn):
            everyone = [value_of(10 * (rank.index % 2) + i, (3, 5)).abs().mul(9).to(dtype) for i in range(comm.size)]
            mine = everyone[comm.index].clone()
            assert comm.broadcast(mine, source) is mine
            assert mine.float().equal(everyone[source].float())
            mine = everyone[comm.index].clone()
            pending = comm.start_broadcast(mine, source)
            assert pending.wait() is mine
            assert mine.float().equal(everyone[source].float())
    number = torch.tensor(float(rank.index))
    assert comm.broadcast(number, 1).item() == comm.ranks[1]
    assert comm.broadcast(torch.zeros(0, 3), 0).shape == (0, 3)


@BOTH
def test_broadcast_supports_every_source_rank_and_dtype(deterministic):
    get_pool(4).run(broadcasts, deterministic)


def ordered_sums(dtype, numel):
    comm = along_dp(deterministic=True)
    parts = [value_of(i, (numel,), torch.float32).mul(10.0**i).to(dtype) for i in range(comm.size)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    assert comm.all_reduce(parts[comm.index].clone()).equal(expected)
    assert comm.start_all_reduce(parts[comm.index].clone()).wait().equal(expected)
    rows = numel // comm.size
    whole = [part[: rows * comm.size].clone() for part in parts]
    assert comm.reduce_scatter(whole[comm.index]).equal(expected[comm.index * rows : (comm.index + 1) * rows])


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ordered_sums_match_sequential_addition_bitwise(world, dtype):
    for numel in (1, 7, 1000, 40_001):  # below and above SMALL of Ordered, divisible by the ranks or not
        get_pool(world).run(ordered_sums, dtype, numel)


def buckets_and_bits(deterministic):
    """Return whether the sum of a vector is bitwise equal to its sum behind another vector in one buffer."""
    comm = along_dp(deterministic)
    x = value_of(comm.index, (5001,), torch.float32)
    alone = comm.all_reduce(x.clone())
    behind = comm.all_reduce(torch.cat((value_of(9, (3333,), torch.float32), x)))[3333:]
    return alone.equal(behind)


def test_ordered_sums_do_not_depend_on_bucket():
    assert get_pool(4).run(buckets_and_bits, True) == [True] * 4
    assert get_pool(4).run(buckets_and_bits, False) == [False] * 4


def zero_dims():
    comm = along_dp(deterministic=True)
    return comm.all_reduce(torch.tensor(float(comm.index))).item()


def test_ordered_sum_accepts_zero_dim_tensor():
    assert get_pool(3).run(zero_dims) == [3.0] * 3


def mesh_axes():
    comms = rank.make_comms(Mesh.of({"dp_replicate": 2, "tp": 2}))
    groups = [comms.get_comm(axes).ranks for axes in ("dp_replicate", "tp", "pp")]
    joint = comms.get_comm("dp_replicate", "tp")
    total = comms.get_comm("tp").all_reduce(torch.tensor([float(rank.index)])).item()
    assert comms.get_comm("tp") is comms.get_comm("tp")
    assert comms.world.ranks == joint.ranks == (0, 1, 2, 3)
    return groups, total


def test_mesh_axes_give_expected_groups():
    found = get_pool(4).run(mesh_axes)
    assert [groups for groups, _ in found] == [
        [(0, 2), (0, 1), (0,)],
        [(1, 3), (0, 1), (1,)],
        [(0, 2), (2, 3), (2,)],
        [(1, 3), (2, 3), (3,)],
    ]
    assert [total for _, total in found] == [1.0, 1.0, 5.0, 5.0]


def folds(size, out_of):
    comms = rank.make_comms(Mesh.of({"dp_shard": 2, "tp": 2}))
    fold = Fold("part", size, out_of)
    inside, beside = comms.fold(fold), comms.fold_rest(fold)
    sums = [comm.all_reduce(torch.tensor([float(rank.index)])).item() for comm in (inside, beside)]
    return inside.ranks, beside.ranks, sums


@pytest.mark.parametrize(
    ("size", "out_of", "inside", "beside"),
    [
        (4, ("dp_shard", "tp"), [(0, 1, 2, 3)] * 4, [(0,), (1,), (2,), (3,)]),
        (2, ("dp_shard", "tp"), [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)]),
        (2, ("tp", "dp_shard"), [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)]),
        (2, ("dp_shard",), [(0, 2), (1, 3), (0, 2), (1, 3)], [(0,), (1,), (2,), (3,)]),
        (1, ("dp_shard", "tp"), [(0,), (1,), (2,), (3,)], [(0, 1, 2, 3)] * 4),
        (8, ("cp",), [(0,), (1,), (2,), (3,)], [(0,), (1,), (2,), (3,)]),  # the mesh has no axis cp, so its size is 1
    ],
)
def test_folds_give_expected_groups(size, out_of, inside, beside):
    found = get_pool(4).run(folds, size, out_of)
    assert [ranks for ranks, _, _ in found] == inside
    assert [ranks for _, ranks, _ in found] == beside
    assert [sums for _, _, sums in found] == [[sum(a), sum(b)] for a, b in zip(inside, beside, strict=True)]


def adjoints(deterministic):
    """Compare <A x, y> with <x, A^T y>, each summed over the ranks, as in the definition of an adjoint."""
    comm = along_dp(deterministic)
    n, i = comm.size, comm.index
    splits = [i + j for j in range(n)]
    cases = {
        "all_reduce": (lambda x: autograd.all_reduce(x, comm), (n * 2, 3)),
        "all_gather": (lambda x: autograd.all_gather(x, comm), (2, 3)),
        "reduce_scatter": (lambda x: autograd.reduce_scatter(x, comm), (n * 2, 3)),
        "all_to_all": (lambda x: autograd.all_to_all(x, comm), (n * 2, 3)),
        "uneven": (lambda x: autograd.all_to_all(x, comm, splits, splits), (sum(splits), 3)),
    }
    for name, (forward, shape) in cases.items():
        x = value_of(10 + i, shape).requires_grad_()
        before = x.detach().clone()
        image = forward(x)
        y = value_of(20 + i, tuple(image.shape))
        (pulled,) = torch.autograd.grad(image, x, y)
        products = torch.stack(((image.detach() * y).sum(), (x.detach() * pulled).sum()))
        left, right = comm.all_reduce(products).tolist()
        assert left == pytest.approx(right, rel=1e-12), name
        assert x.detach().equal(before), name


@BOTH
@pytest.mark.parametrize("world", SIZES)
def test_collective_gradients_are_adjoints(world, deterministic):
    get_pool(world).run(adjoints, deterministic)


def test_collectives_on_axis_of_one_are_local():
    comm = Solo("tp", 5)
    x = torch.arange(4.0)
    assert comm.ranks == (5,)
    assert comm.all_reduce(x) is x
    assert comm.start_all_reduce(x).wait() is x
    assert comm.all_gather(x).equal(x)
    assert comm.reduce_scatter(x).equal(x)
    assert comm.all_to_all(x, [4], [4]).equal(x)
    assert comm.broadcast(x, 0) is x
    into = [torch.zeros(4), torch.zeros(4)]
    assert comm.exchange([(x, 0), (x + 1, 0)], [(y, 0) for y in into])[1].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert into[0].equal(x)


def test_a_world_of_one_needs_no_process_group():
    comms = connect(Mesh.of({}), deterministic=True)
    assert not torch.distributed.is_initialized()
    assert comms.world.size == 1
    comms.store.set("a", b"1")
    assert comms.store.get("a") == b"1"
    comms.close()


def store():
    comms = rank.make_comms(Mesh.of({"dp_shard": rank.world}))
    comms.store.set(f"key{rank.index}", b"value")
    found = [comms.store.get(f"key{index}") for index in range(rank.world)]
    return found, comms.store.add("count", 1) in (1, 2)


def sums_of_axes(orders):
    """Connect a new mesh, so that its groups do not exist yet, and return the sums along its axes."""
    comms = connect(Mesh.of({"pp": 2, "tp": 3}), timeout=60)
    axes = {axes: comms.get_comm(*axes) for axes in orders[rank.index]}
    assert all(comm.ranks[comm.index] == rank.index for comm in axes.values())
    return {axes: float(comm.all_reduce(torch.tensor([2.0**rank.index]))) for axes, comm in sorted(axes.items())}


def test_ranks_create_groups_in_different_orders_without_deadlock():
    """Make rank 0 wait for 3 along pp, rank 3 for 4 along tp, rank 4 for 1 along pp, and rank 1 for 0 along tp."""
    pp, tp = ("pp",), ("tp",)
    orders = {0: [pp, tp], 3: [tp, pp], 4: [pp, tp], 1: [tp, pp], 2: [pp, tp], 5: [tp, pp]}
    found = get_pool(6).run(sums_of_axes, orders)
    for index, sums in enumerate(found):
        assert sums[pp] == 2.0 ** (index % 3) + 2.0 ** (index % 3 + 3)
        assert sums[tp] == 7.0 * 8.0 ** (index // 3)


def index_in_a_group(axes):
    comm = connect(Mesh.of({"pp": 2, "tp": 3}), timeout=60).get_comm(*axes)
    return comm.index, comm.all_gather(torch.tensor([comm.index])).tolist()


def test_group_ranks_follow_axis_order():
    """Check the order 0, 3, 1, 4, 2, 5, in which the last axis varies fastest."""
    found = get_pool(6).run(index_in_a_group, ("tp", "pp"))
    assert [index for index, _ in found] == [0, 2, 4, 1, 3, 5]
    assert all(gathered == list(range(6)) for _, gathered in found)


def test_ranks_share_one_store():
    """Read keys by `get`, which waits for a key: `set` may return before the key is in the store."""
    assert get_pool(2).run(store) == [([b"value"] * 2, True)] * 2
