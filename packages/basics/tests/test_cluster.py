"""Cluster files: shipped files, required fields, prices, network tiers, and errors of invalid files.

A missing number is an error; the reader fills in no value.
"""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given, strategies as st

from gangline import UserError
from gangline.explain.topology import Topology
from gangline.mesh import Mesh
from gangline_basics.cluster.file import SHIPPED, list_shipped, load_cluster, save_cluster


@pytest.mark.parametrize("name", list_shipped())
def test_shipped_files_are_complete_and_name_sources(name):
    found = load_cluster(name)
    assert found["peak.bf16"] > 1e13
    assert found["memory.bytes"] > 1e10
    assert all(len(quantity.source) > 5 for quantity in found.numbers.values())
    assert found.topology.node_bandwidth * 1e9 == found["link.node.bandwidth"]


def test_custom_cluster_file_is_loaded(tmp_path):
    content = yaml.safe_load((SHIPPED / "h100_ib.yaml").read_text())
    content["numbers"]["price.hour"] = {"value": 2.5, "source": "a contract"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    found = load_cluster(str(path))
    assert found.name == "mine"
    assert found["price.hour"] == 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(version=7), "is a cluster file of version 7"),
        (lambda content: content.pop("version"), "of version None"),
        (lambda content: content["numbers"].pop("peak.bf16"), "missing numbers: peak.bf16"),
        (lambda content: content["numbers"].update({"peak.bf61": {"value": 1, "source": "x"}}), "peak.bf61"),
        (
            lambda content: content["numbers"].update({"watts": {"value": 1}}),
            "watts must have a value, which is a number, and a source",
        ),
        (lambda content: content["numbers"].update({"watts": {"value": -1, "source": "x"}}), "watts=-1"),
        (lambda content: content.pop("numbers"), "numbers must be a mapping"),
        (lambda content: content.pop("network"), "the description of the network is incomplete"),
    ],
)
def test_invalid_cluster_file_is_refused(tmp_path, change, message):
    content = yaml.safe_load((SHIPPED / "h100_ib.yaml").read_text())
    change(content)
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError) as refused:
        load_cluster(str(path))
    assert message in str(refused.value)


ZERO = ("peak.bf16", "memory.bandwidth", "memory.bytes", "matmul.efficiency", "attention.efficiency", "failure.hours")
ZERO += ("link.node.bandwidth", "link.cluster.bandwidth", "link.node.efficiency")


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        *(("numbers", name, 0, f"{name}=0 must be more than 0") for name in ZERO),
        ("numbers", "overlap.share", 2.5, "overlap.share=2.5 must be between 0 and 1"),
        ("numbers", "node.alone", 0.5, "node.alone=0.5 must be at least 1"),
        ("numbers", "jitter.sigma", -0.1, "jitter.sigma=-0.1 must be at least 0"),
        ("numbers", "peak.bf16", True, "peak.bf16 must have a value, which is a number, and a source"),
        ("network", "gpus_per_node", 0, "network.gpus_per_node=0 must be an integer of at least 1"),
        ("network", "gpus_per_node", -3, "network.gpus_per_node=-3 must be"),
        ("network", "gpus_per_node", 4.7, "network.gpus_per_node=4.7 must be"),
        ("network", "nodes_per_rack", 0, "network.nodes_per_rack=0 must be"),
        ("network", "nodes_per_rack", True, "network.nodes_per_rack=True must be"),
    ],
)
def test_out_of_range_number_is_refused(tmp_path, part, name, value, message):
    content = yaml.safe_load((SHIPPED / "h100_ib.yaml").read_text())
    content[part][name] = value if part == "network" else {"value": value, "source": "by hand"}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=re.escape(message)):
        load_cluster(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"network": {"gpus_per_node": 8, "nodes_per_rak": 4}},
            "unknown key network.nodes_per_rak.",
        ),
        ({"abut": "ours"}, "unknown key abut."),
        ({"network": 3}, "network must be a mapping."),
    ],
)
def test_unknown_key_is_refused(tmp_path, change, message):
    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load((SHIPPED / "h100_ib.yaml").read_text()) | change))
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        load_cluster(str(path))
    assert refused.value.details


FIBRE = {"bandwidth": 1e9, "latency": 1e-3, "efficiency": 0.8}


def two_datacentres() -> dict:
    content = yaml.safe_load((SHIPPED / "h100_ib.yaml").read_text())
    content["network"]["nodes_per_datacentre"] = 512
    content["numbers"] |= {f"link.fibre.{name}": {"value": of, "source": "a test"} for name, of in FIBRE.items()}
    return content


def test_two_datacentre_file_round_trips(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(two_datacentres()))
    found = load_cluster(str(path))
    network = found.topology
    assert (network.nodes_per_datacentre, network.fibre_bandwidth, network.rack_bandwidth) == (512, 1.0, 50.0)
    assert network.find_tier_of([0, 8 * 512]) == "fibre"
    assert network.find_tier_of([0, 8 * 511]) == "cluster"
    save_cluster(found, tmp_path / "again.yaml")
    again = load_cluster(str(tmp_path / "again.yaml"))
    assert (again.topology, again.numbers) == (found.topology, found.numbers)


@pytest.mark.parametrize(
    ("part", "name", "message"),
    [
        ("numbers", "link.fibre.latency", "missing numbers: link.fibre.latency"),
        ("numbers", "link.fibre.bandwidth", "missing numbers: link.fibre.bandwidth"),
        ("network", "nodes_per_datacentre", "nodes_per_datacentre"),
    ],
)
def test_incomplete_fibre_settings_are_refused(tmp_path, part, name, message):
    content, path = two_datacentres(), tmp_path / "two.yaml"
    del content[part][name]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=re.escape(message)):
        load_cluster(str(path))


def test_unknown_cluster_name_gets_suggestion():
    with pytest.raises(UserError) as refused:
        load_cluster("h100_bi")
    assert "h100_ib" in str(refused.value)


def test_missing_price_is_refused():
    with pytest.raises(UserError) as refused:
        load_cluster("b200_ib")["price.hour"]
    assert "gangline invents no numbers" in str(refused.value)


def test_every_shipped_price_has_dated_source():
    priced = [
        load_cluster(name).numbers["price.hour"] for name in list_shipped() if load_cluster(name).get("price.hour")
    ]
    assert priced
    for price in priced:
        assert re.search(r"20\d\d", price.source), price.source


@given(st.data())
def test_network_tier_matches_search_over_all_groups(data):
    sizes = {axis: data.draw(st.sampled_from([1, 2, 3, 4, 6])) for axis in ("pp", "dp_shard", "cp", "tp")}
    axes = data.draw(st.lists(st.sampled_from(sorted(sizes)), min_size=1, max_size=3, unique=True))
    mesh, network = Mesh.of(sizes), Topology(gpus_per_node=data.draw(st.sampled_from([2, 3, 8])), nodes_per_rack=2)
    network.nodes_per_datacentre = data.draw(st.sampled_from([None, 3, 4]))
    others = [axis for axis in mesh.axes if axis not in axes]
    groups = [
        [mesh.rank({**start, **point}) for point in mesh.iterate_along({}, axes)]
        for start in mesh.iterate_along({}, others)
    ]
    assert network.find_tier(mesh, *axes) == network.find_slowest(groups)
