"""The verb itself: starts the ranks, and writes what they found as a cluster file."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from gangline import UserError
from gangline.cluster import Cluster, Quantity, Topology, save_cluster

ASSUMED = {  # what no measurement of one machine shows
    "matmul.efficiency": (1.0, "the peak of this file is what was measured"),
    "memory.efficiency": (1.0, "the bandwidth of this file is what was measured"),
    "link.node.efficiency": (1.0, "the bandwidth of this file is what was measured"),
    "link.cluster.efficiency": (1.0, "the bandwidth of this file is what was measured"),
    "overlap.share": (0.5, "assumed"),
    "jitter.sigma": (0.003, "assumed"),
    "link.node.bandwidth": (1e9, "assumed: one process has no peer to send to"),
    "link.node.latency": (5e-5, "assumed: one process has no peer to send to"),
}


def calibrate(out: Path, processes: int) -> str:
    """Writes `out`; what was measured, as text. Raises UserError where ranks fail or the file is there already."""
    if out.exists():
        raise UserError(f"{out} is there already.", "It is not written over.", "--out=ANOTHER.yaml")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no directory.")
    found = _measured(processes)
    source = f"measured by gangline plan calibrate on {platform.node()}, {processes} processes at once"
    numbers = {name: Quantity(value, why) for name, (value, why) in ASSUMED.items()}
    numbers |= {name: Quantity(value, source) for name, value in found.items()}
    for name in ("bandwidth", "latency"):  # one machine: nothing is beyond it
        inside = numbers[f"link.node.{name}"].value
        numbers[f"link.cluster.{name}"] = Quantity(inside, "as inside the node: one machine was measured")
    bandwidth = numbers["link.node.bandwidth"].value / 1e9
    topology = Topology(
        gpus_per_node=processes, node_bandwidth=bandwidth, rack_bandwidth=bandwidth, cluster_bandwidth=bandwidth
    )
    save_cluster(Cluster(out.stem, f"{platform.machine()}, {processes} ranks", topology, numbers), out)
    return "\n".join([f"{name:30} {value:.4g}" for name, value in found.items()] + [f"written: {out}"])


def _measured(processes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "found.json"
        words = [sys.executable, "-m"]
        if processes > 1:
            words += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
        ended = subprocess.run(
            [*words, "gangline_planner.calibrate.rank", str(found)], capture_output=True, text=True, check=False
        )
        if ended.returncode or not found.is_file():
            last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"the measurement with {processes} processes failed.", last)
        return {name: float(value) for name, value in json.loads(found.read_text()).items()}
