"""Options of the strategies: help texts, round trips, default microbatches, network tiers."""

from __future__ import annotations

import pytest

from gangline.config.defaults import build_default_run
from gangline.config.fields import iterate_options
from gangline.config.serial import from_dict, to_dict
from gangline.explain.topology import Topology
from gangline.mesh import AXES, Mesh
from gangline_parallel_megatron_style.config import AxesConfig, Fsdp, Hsdp, Pp, ThreeD, Tp

PARTS = (ThreeD, Fsdp, Hsdp, Tp, Pp)


@pytest.mark.parametrize("part", PARTS)
def test_every_option_has_help(part):
    assert [option.path for option in iterate_options(part, "parallel") if not option.comment] == []


@pytest.mark.parametrize("option", ["schedule", "context", "zero"])
def test_option_help_names_all_choices(option):
    found = next(each for each in iterate_options(AxesConfig, "parallel") if each.path == f"parallel.{option}")
    assert len(found.choices) > 1
    assert [choice for choice in found.choices if choice not in found.help] == []


@pytest.mark.parametrize("part", PARTS)
def test_options_round_trip_through_a_dict(part):
    config = part(tp=2, stages=[3, 1], topology=Topology(gpus_per_node=4, node_bandwidth=300.0))
    assert from_dict(to_dict(build_default_run(parallel=config))).parallel == config


def test_all_parts_have_the_same_options():
    names = {tuple(option.path for option in iterate_options(part, "parallel")) for part in PARTS}
    assert len(names) == 1


@pytest.mark.parametrize(
    ("pp", "share", "microbatches"),
    [
        (1, 16, 1),
        (2, 16, 8),  # four for each pipeline rank
        (4, 64, 16),
        (4, 6, 6),  # one sample each: six is the maximum
        (4, 1, 1),
        (3, 24, 12),
        (4, 20, 20),  # 16 does not divide 20, and multiples of pp=4 come first
        (2, 7, 7),
    ],
)
def test_pipeline_gets_expected_default_microbatch_count(pp, share, microbatches):
    assert Pp().count_microbatches(share, Mesh.of({"pp": pp})) == microbatches


# --- network tiers ---


def test_axis_network_tier_follows_topology():
    """Check four nodes of two ranks each, in racks of two nodes."""
    network = Topology(gpus_per_node=2, nodes_per_rack=2)
    mesh = Mesh.of({"pp": 2, "dp_shard": 2, "tp": 2})
    assert [network.find_tier(mesh, axis) for axis in ("tp", "dp_shard", "pp", "cp")] == [
        "node",
        "rack",
        "cluster",
        "self",
    ]
    assert network.find_tier(mesh, "dp_shard", "tp") == "rack"
    assert network.find_tier(mesh, *AXES) == "cluster"


def test_group_across_two_nodes_uses_slower_links():
    network = Topology(gpus_per_node=4, nodes_per_rack=8)
    assert network.find_tier(Mesh.of({"dp_shard": 4, "tp": 3}), "tp") == "rack"
    assert network.find_tier(Mesh.of({"dp_shard": 3, "tp": 4}), "tp") == "node"


def test_bandwidth_is_chosen_by_network_tier():
    network = Topology(node_bandwidth=450, rack_bandwidth=50, cluster_bandwidth=25)
    assert network.get_bandwidth("node") == 450e9
    assert network.get_bandwidth("rack") == 50e9
    assert network.get_bandwidth("cluster") == 25e9
    assert network.get_bandwidth("self") == float("inf")
