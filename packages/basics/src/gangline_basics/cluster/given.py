"""Nodes of a run's newest start, and their positions in the network. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gangline.explain.topology import Topology


@dataclass(frozen=True)
class GivenNodes:
    """Nodes of one start of a run, in rank order.

    places: each node's path from the top of the network, such as "spine.rack0.n1", or its name.
    """

    names: tuple[str, ...]
    places: tuple[str, ...]
    processes: int  # number of processes that train
    spares: int  # number of spare processes, which wait

    @property
    def ranks_of_node(self) -> int:
        return (self.processes + self.spares) // len(self.names)

    def build_topology(self, base: Topology | None = None) -> Topology:
        """Return a copy of `base` with the numbers of GPUs per node and of nodes per rack of the ranks that train."""
        each = self.ranks_of_node
        training = self.places[: -(-self.processes // each)]
        return replace(base or Topology(), gpus_per_node=each, nodes_per_rack=count_nodes_per_rack(training))


def read_nodes(run_dir: str | Path) -> GivenNodes | None:
    """Return the nodes of a run's newest start, or None if no rank has been started yet."""
    from gangline.run.events import read_events

    launches = [line for line in read_events(run_dir) if line.get("event") == "launch"]
    if not launches:
        return None
    last = launches[-1]
    names = tuple(last["nodes"])
    return GivenNodes(names, tuple(last.get("places") or names), last["processes"], last["spares"])


def count_nodes_per_rack(places: Sequence[str]) -> int:
    """Return how many nodes share a lowest-level switch (rack), or 1 if racks have different numbers of nodes."""
    sizes = set(Counter(place.rpartition(".")[0] for place in places).values())
    return sizes.pop() if len(sizes) == 1 else 1
