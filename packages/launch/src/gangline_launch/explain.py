"""`gangline launch explain`: nodes, axis by tier, and the settings of the network with their sources. Torch-free."""

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
    """Print all of it; what was not given yet is missing."""
    run = RunDirectory.open(run_dir).run()
    config = run.launch
    print("\n".join(axes_by_tier(run, run_dir)))
    fabric = config.fabric if isinstance(config, ClusterLaunch) else "default"
    print(f"fabric {fabric}" + ("" if FABRICS[fabric] else ": what NCCL finds by itself"))
    for line in FABRICS[fabric]:
        shown = line.value if line.setup else f"{line.name}={line.value}"
        print(f"  {shown}\n      {line.why}\n      {line.source}")
    return 0


def axes_by_tier(run: Run, run_dir: Path) -> list[str]:
    """Lines: the newest start's nodes in the order of their ranks, then each axis and the slowest links it crosses."""
    given = read_nodes(run_dir)
    if given is None:
        return ["no node was given yet"]
    each, world = given.ranks_of_node, given.processes
    lines = [f"{len(given.names)} nodes, {world} ranks"]
    for number, place in enumerate(given.places):
        first, last = number * each, min(world, (number + 1) * each) - 1
        lines.append(f"  {place}: " + (f"ranks {first} to {last}" if first <= last else "waits as a spare"))
    topology, mesh = given.build_topology(), Mesh.of(run.parallel.size_axes(world))
    for axis, size in mesh.sizes:
        if size > 1:
            lines.append(f"  {axis} {size}: its ranks reach each other over the {topology.find_tier(mesh, axis)}")
    return lines
