"""The cluster file: what is read, what is refused, and that nothing is invented."""

from __future__ import annotations

import pytest
import yaml

from gangline import UserError
from gangline.cluster import load_cluster, shipped
from gangline.cluster.file import SHIPPED


@pytest.mark.parametrize("name", shipped())
def test_shipped_files_are_whole_and_name_their_sources(name):
    found = load_cluster(name)
    assert found["peak.bf16"] > 1e13
    assert found["memory.bytes"] > 1e10
    assert all(len(quantity.source) > 5 for quantity in found.numbers.values())
    assert found.topology.node_bandwidth * 1e9 == found["link.node.bandwidth"]


def test_a_file_of_ones_own(tmp_path):
    given = yaml.safe_load((SHIPPED / "h100_ib.yaml").read_text())
    given["numbers"]["price.hour"] = {"value": 2.5, "source": "a contract"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(given))
    found = load_cluster(str(path))
    assert found.name == "mine"
    assert found["price.hour"] == 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.update(version=7), "is a cluster file of version 7"),
        (lambda given: given.pop("version"), "of version None"),
        (lambda given: given["numbers"].pop("peak.bf16"), "does not say peak.bf16"),
        (lambda given: given["numbers"].update({"peak.bf61": {"value": 1, "source": "x"}}), "peak.bf61"),
        (lambda given: given["numbers"].update({"watts": {"value": 1}}), "watts needs a number and its source"),
        (lambda given: given["numbers"].update({"watts": {"value": -1, "source": "x"}}), "watts=-1"),
        (lambda given: given.pop("numbers"), "has no `numbers`"),
        (lambda given: given.pop("network"), "does not say what its network is"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, change, message):
    given = yaml.safe_load((SHIPPED / "h100_ib.yaml").read_text())
    change(given)
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(given))
    with pytest.raises(UserError) as refused:
        load_cluster(str(path))
    assert message in str(refused.value)


def test_an_unknown_name_has_neighbours():
    with pytest.raises(UserError) as refused:
        load_cluster("h100_bi")
    assert "h100_ib" in str(refused.value)


def test_no_price_is_invented():
    with pytest.raises(UserError) as refused:
        load_cluster("h100_ib")["price.hour"]
    assert "Nothing is invented" in str(refused.value)
