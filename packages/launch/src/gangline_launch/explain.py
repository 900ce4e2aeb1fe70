"""Command `gangline launch explain`: nodes, network tiers of mesh axes, network settings with sources. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gangline.mesh import Mesh
from gangline.run.directory import RunDirectory
from gangline_basics.cluster.given import read_nodes
from gangline_launch.config import ClusterLaunch
from gangline_launch.fabric import FABRICS

if TYPE_CHECKING:
    from gangline.config import Run


def explain(run_dir: Path) -> int:
    """Print mesh axes with their network tiers, and network settings; return 0. Axes need a first start of the run."""
    run = RunDirectory.open(run_dir).run()
    config = run.launch
    print("\n".join(describe_axes_by_tier(run, run_dir)))
    fabric = config.fabric if isinstance(config, ClusterLaunch) else "default"
    print(f"fabric {fabric}" + ("" if FABRICS[fabric] else ": no settings, NCCL detects the network"))
    for line in FABRICS[fabric]:
        setting = line.value if line.setup else f"{line.name}={line.value}"
        print(f"  {setting}\n      {line.why}\n      {line.source}")
    return 0


def describe_axes_by_tier(run: Run, run_dir: Path) -> list[str]:
    """Return lines: nodes of the newest start in rank order, then the slowest network tier of each mesh axis."""
    nodes = read_nodes(run_dir)
    if nodes is None:
        return ["no nodes yet: the ranks of the run have not started"]
    each, world = nodes.ranks_of_node, nodes.processes
    lines = [f"{len(nodes.names)} nodes, {world} ranks"]
    for number, place in enumerate(nodes.places):
        first, last = number * each, min(world, (number + 1) * each) - 1
        lines.append(f"  {place}: " + (f"ranks {first} to {last}" if first <= last else "spare, without ranks"))
    topology, mesh = nodes.build_topology(), Mesh.of(run.parallel.size_axes(world))
    for axis, size in mesh.sizes:
        if size > 1:
            lines.append(f"  {axis} {size}: ranks communicate over the {topology.find_tier(mesh, axis)}")
    return lines
