"""`launch.nodes`: number of nodes as a number or a range."""

from __future__ import annotations

import pytest

from gangline import UserError
from gangline_basics.launch.nodes import parse_nodes


@pytest.mark.parametrize(("nodes", "found"), [("2", (2, 2)), ("2:3", (2, 3)), ("1:1", (1, 1))])
def test_node_range_is_parsed(nodes, found):
    assert parse_nodes(nodes) == found


@pytest.mark.parametrize("nodes", ["", "0", "two", "0:3", "3:2", "1:2:3", "-1:2"])
def test_invalid_node_range_is_refused(nodes):
    with pytest.raises(UserError, match=f"launch.nodes={nodes}"):
        parse_nodes(nodes)
