"""What a collective takes: rings, trees, rails, and nodes that get into each other's way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gangline.cluster import Quantity, load_cluster
from gangline.explain import Transfer
from gangline_planner.price.step import jitter_of
from gangline_planner.price.transfers import messages, transfer_seconds

SENT = Transfer(
    axes=("dp_shard",), purpose="gradients", operation="reduce_scatter", ranks=64, each_node=8, tier="cluster", calls=2,
    bytes=10**9, when="end", waits=True,
)  # fmt: skip


def machine(**numbers):
    known = {
        "link.node.bandwidth": 4e11, "link.cluster.bandwidth": 5e10, "link.node.efficiency": 1.0,
        "link.cluster.efficiency": 1.0, "link.cluster.crowding": 0.0, "link.node.latency": 0.0,
        "link.cluster.latency": 0.0,
    }  # fmt: skip
    given = known | {name.replace("__", "."): value for name, value in numbers.items()}
    return load_cluster("h100_ib").with_numbers({name: Quantity(value, "a test") for name, value in given.items()})


@pytest.mark.parametrize(
    ("operation", "ranks", "nodes", "expected"),
    [
        ("send", 4, 1, (1, 0)),
        ("send", 4, 4, (0, 1)),
        ("all_gather", 8, 1, (7, 0)),
        ("reduce_scatter", 64, 8, (56, 7)),  # 63 hops of a ring, of which one less than there are nodes lead to another
        ("all_gather", 8, 8, (0, 7)),
        ("all_reduce", 8, 1, (6, 0)),  # a tree of eight ranks is three high
        ("all_reduce", 64, 8, (6, 6)),
    ],
)
def test_messages_on_the_way_of_a_call(operation, ranks, nodes, expected):
    assert messages(operation, ranks, nodes) == expected


def test_the_way_round_a_ring_grows_with_its_ranks():
    cluster = machine(link__node__latency=1e-6, link__cluster__latency=1e-5)
    bare = transfer_seconds(SENT, machine())
    assert transfer_seconds(SENT, cluster) - bare == pytest.approx(2 * (56e-6 + 7e-5))
    twice = replace(SENT, ranks=128)
    assert transfer_seconds(twice, cluster) - bare == pytest.approx(2 * (112e-6 + 15e-5))


def test_the_more_nodes_the_longer_the_same_bytes_take():
    rails = 10**9 / (8 * 5e10)
    assert transfer_seconds(SENT, machine()) == pytest.approx(rails)
    assert transfer_seconds(SENT, machine(link__cluster__crowding=0.1)) == pytest.approx(rails * 1.3)  # 2 x 2 x 2 nodes
    alone = replace(SENT, tier="node", ranks=8)
    crowded = machine(link__cluster__crowding=0.1)
    assert transfer_seconds(alone, crowded) == transfer_seconds(alone, machine())
    send = replace(SENT, operation="send")
    assert transfer_seconds(send, crowded) == transfer_seconds(send, machine())


def test_the_slowest_of_many_ranks_is_late_however_short_the_step_is():
    cluster = machine(jitter__sigma=0.01, jitter__seconds=0.02)
    assert jitter_of(1.0, 1, cluster) == 0
    assert jitter_of(1.0, 4096, cluster) == pytest.approx(0.03 * 4.0787, rel=1e-4)
    assert jitter_of(0.0, 4096, cluster) == pytest.approx(0.02 * 4.0787, rel=1e-4)
