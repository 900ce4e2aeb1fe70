"""Machines as data: their network, and the versioned file that says what they compute, send, draw and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.cluster.file import (
        NUMBERS as NUMBERS,
        VERSION as VERSION,
        Cluster as Cluster,
        Quantity as Quantity,
        load_cluster as load_cluster,
        save_cluster as save_cluster,
        shipped as shipped,
    )
    from gangline.cluster.given import (
        GivenNodes as GivenNodes,
        given_nodes as given_nodes,
        nodes_per_rack as nodes_per_rack,
    )
    from gangline.cluster.topology import Tier as Tier, Topology as Topology

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.cluster.topology": "Tier Topology",
        "gangline.cluster.given": "GivenNodes given_nodes nodes_per_rack",
        "gangline.cluster.file": "NUMBERS VERSION Cluster Quantity load_cluster save_cluster shipped",
    },
)
