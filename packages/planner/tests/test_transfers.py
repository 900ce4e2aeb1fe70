"""Time of a collective: rings, trees, network tiers, rails, and contention between nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gangline.explain.explained import Transfer
from gangline_basics.cluster.file import Quantity, load_cluster
from gangline_planner.price.step import compute_jitter
from gangline_planner.price.transfers import compute_transfer_seconds, count_messages

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
    return load_cluster("h100_ib").replace_numbers({name: Quantity(value, "a test") for name, value in given.items()})


@pytest.mark.parametrize(
    ("operation", "ranks", "nodes", "expected"),
    [
        ("send", 4, 1, (1, 0)),
        ("send", 4, 4, (0, 1)),
        ("all_gather", 8, 1, (7, 0)),
        ("reduce_scatter", 64, 8, (56, 7)),  # 63 hops of a ring, of which 7 (nodes - 1) lead to another node
        ("all_gather", 8, 8, (0, 7)),
        ("all_reduce", 8, 1, (6, 0)),  # a tree of eight ranks has three levels
        ("all_reduce", 64, 8, (6, 6)),
    ],
)
def test_collectives_have_expected_message_counts(operation, ranks, nodes, expected):
    assert count_messages(operation, ranks, nodes) == expected


def test_ring_latency_grows_with_ranks():
    cluster = machine(link__node__latency=1e-6, link__cluster__latency=1e-5)
    bare = compute_transfer_seconds(SENT, machine())
    assert compute_transfer_seconds(SENT, cluster) - bare == pytest.approx(2 * (56e-6 + 7e-5))
    twice = replace(SENT, ranks=128)
    assert compute_transfer_seconds(twice, cluster) - bare == pytest.approx(2 * (112e-6 + 15e-5))


def test_crowding_slows_transfers_over_many_nodes():
    rails = 10**9 / (8 * 5e10)
    assert compute_transfer_seconds(SENT, machine()) == pytest.approx(rails)
    assert compute_transfer_seconds(SENT, machine(link__cluster__crowding=0.1)) == pytest.approx(
        rails * 1.3
    )  # 8 nodes: three doublings
    alone = replace(SENT, tier="node", ranks=8)
    crowded = machine(link__cluster__crowding=0.1)
    assert compute_transfer_seconds(alone, crowded) == compute_transfer_seconds(alone, machine())
    send = replace(SENT, operation="send")
    assert compute_transfer_seconds(send, crowded) == compute_transfer_seconds(send, machine())


def test_rank_jitter_does_not_vanish_for_short_steps():
    cluster = machine(jitter__sigma=0.01, jitter__seconds=0.02)
    assert compute_jitter(1.0, 1, cluster) == 0
    assert compute_jitter(1.0, 4096, cluster) == pytest.approx(0.03 * 4.0787, rel=1e-4)
    assert compute_jitter(0.0, 4096, cluster) == pytest.approx(0.02 * 4.0787, rel=1e-4)


def tiers(**numbers):
    """Return a cluster with racks of 2 nodes of 4 ranks, and datacentres of 2 racks."""
    given = {
        "link.rack.bandwidth": 2e11, "link.rack.efficiency": 1.0, "link.rack.latency": 0.0,
        "link.fibre.bandwidth": 1e9, "link.fibre.efficiency": 0.5, "link.fibre.latency": 0.0,
    }  # fmt: skip
    given |= {name.replace("__", "."): value for name, value in numbers.items()}
    return machine(**{name.replace(".", "__"): value for name, value in given.items()})


@pytest.mark.parametrize(
    ("tier", "ranks", "near", "seconds"),
    [
        ("node", 4, (4, 4, 4), 1 / 4e11),
        ("rack", 8, (4, 8, 8), 1 / 4e11),  # 4 rails of 2e11 are faster than the links inside a node
        ("rack", 2, (1, 2, 2), 1 / 2e11),
        ("cluster", 16, (4, 8, 16), 1 / 4e11),  # 8 links of 5e10
        ("cluster", 4, (1, 2, 4), 1 / 1e11),
        ("fibre", 32, (4, 8, 16), 1 / 8e9),  # 16 ranks send over the fibre at once
        ("fibre", 2, (1, 1, 1), 1 / 5e8),
    ],
)
def test_ring_runs_at_slowest_tier_bandwidth(tier, ranks, near, seconds):
    each = dict(zip(("each_node", "each_rack", "each_datacentre"), near, strict=True))
    sent = replace(SENT, tier=tier, ranks=ranks, **each)
    assert compute_transfer_seconds(sent, tiers()) == pytest.approx(1e9 * seconds)


def test_messages_of_each_tier_take_its_latency():
    sent = replace(SENT, tier="fibre", ranks=32, each_node=4, each_rack=8, each_datacentre=16)
    late = {"link__node__latency": 1.0, "link__rack__latency": 10.0, "link__cluster__latency": 100.0}
    cluster = tiers(**late, link__fibre__latency=1000.0)
    waits = compute_transfer_seconds(sent, cluster) - compute_transfer_seconds(sent, tiers())
    assert waits == pytest.approx(2 * (24 * 1 + 4 * 10 + 2 * 100 + 1 * 1000))  # 8 nodes, 4 racks
    summed = replace(sent, operation="all_reduce", calls=1)
    waits = compute_transfer_seconds(summed, cluster) - compute_transfer_seconds(summed, tiers())
    assert waits == pytest.approx(2 * (2 * 1 + 1 * 10 + 1 * 100 + 1 * 1000))
    send = replace(sent, operation="send", calls=3)
    assert compute_transfer_seconds(send, cluster) == pytest.approx(3 * 1000 + 1e9 / 5e8)


def test_all_to_all_splits_bytes_by_tier():
    sent = replace(SENT, operation="all_to_all", tier="fibre", ranks=32, each_node=4, each_rack=8, each_datacentre=16)
    assert compute_transfer_seconds(sent, tiers()) == pytest.approx(1e9 * 16 / 31 / 5e8)
    near = replace(sent, tier="cluster", ranks=16)
    assert compute_transfer_seconds(near, tiers()) == pytest.approx(1e9 * 8 / 15 / 5e10)


def test_missing_rack_links_default_to_cluster_links():
    rack = replace(SENT, tier="rack", ranks=16, each_rack=16, each_datacentre=16)
    assert compute_transfer_seconds(rack, machine()) == compute_transfer_seconds(
        replace(rack, tier="cluster"), machine()
    )
