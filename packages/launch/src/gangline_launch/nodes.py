"""Nodes that the scheduler gave: names, addresses and network places, by which ranks are ordered. Torch-free."""

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

    name     the scheduler's; for a pod "NODE/INDEX", since a node may hold several pods; unique within the job
    address  by which the other nodes reach it
    place    in the network, from the top to the node
    """

    name: str
    address: str
    place: str = ""


def find_own_node(run_dir: Path, environ: Mapping[str, str] = os.environ) -> GivenNode:
    """Return the node of this process, from the variables of Kubernetes or Slurm."""
    host = os.uname().nodename
    if "GANGLINE_POD" in environ:  # in a JobSet: the pod's own address, and the node that it runs on
        node, address = environ.get("GANGLINE_KUBERNETES_NODE", host), environ["GANGLINE_POD"]
        index = environ.get("GANGLINE_PLACE", "")  # follows the order of the places that Kueue gave to the pods
        place = levels.find_place(run_dir, node) or f"{index}.{node.replace('.', '-')}"
        return GivenNode(f"{node}/{index}", address, place)
    name = environ.get("SLURMD_NODENAME", host)
    return GivenNode(name, read_addresses(run_dir).get(name, host), environ.get("SLURM_TOPOLOGY_ADDR", name))


def read_addresses(run_dir: Path) -> dict[str, str]:
    """Return name -> address, as the batch script wrote Slurm's answer; {} if it did not."""
    path = Path(run_dir, FOLDER, "nodes")
    lines = [parse_fields(line) for line in read_regular(path).decode().splitlines()] if path.exists() else []
    return {line["NodeName"]: line.get("NodeAddr") or line["NodeName"] for line in lines if "NodeName" in line}
