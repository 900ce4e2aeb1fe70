"""Nodes that the scheduler allocated: names, addresses and network locations, which order the ranks. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gangline.storage.files import read_regular
from gangline_launch.job import FOLDER
from gangline_launch.kubernetes import levels
from gangline_launch.slurm.commands import parse_fields


@dataclass(frozen=True)
class GivenNode:
    """A node of the job.

    name     unique in the job: the scheduler's node name, or "NODE/INDEX" for a pod, since a node may hold several
    address  host name or IP address at which other nodes reach the node
    place    network location, from the top level to the node
    """

    name: str
    address: str
    place: str = ""


def find_own_node(run_dir: Path, environ: Mapping[str, str] = os.environ) -> GivenNode:
    """Return the node of this process, from the variables of Kubernetes or Slurm."""
    host = os.uname().nodename
    if "GANGLINE_POD" in environ:  # in a JobSet: address of the pod, and name of its Kubernetes node
        node, address = environ.get("GANGLINE_KUBERNETES_NODE", host), environ["GANGLINE_POD"]
        index = environ.get("GANGLINE_PLACE", "")  # completion indices follow the order in which Kueue placed the pods
        place = levels.find_place(run_dir, node) or f"{index}.{node.replace('.', '-')}"
        return GivenNode(f"{node}/{index}", address, place)
    name = environ.get("SLURMD_NODENAME", host)
    return GivenNode(name, read_addresses(run_dir).get(name, host), environ.get("SLURM_TOPOLOGY_ADDR", name))


def read_addresses(run_dir: Path) -> dict[str, str]:
    """Return node name -> address, from the file that the batch script wrote with scontrol; {} without the file."""
    path = Path(run_dir, FOLDER, "nodes")
    lines = [parse_fields(line) for line in read_regular(path).decode().splitlines()] if path.exists() else []
    return {line["NodeName"]: line.get("NodeAddr") or line["NodeName"] for line in lines if "NodeName" in line}
