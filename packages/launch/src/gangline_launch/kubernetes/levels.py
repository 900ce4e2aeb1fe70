"""Network locations of nodes, from node labels, read before the submit: pods may not read labels. Torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gangline import UserError
from gangline.storage.files import read_regular, write_whole
from gangline_launch import job as jobs
from gangline_launch.kubernetes.scheduler import KubectlError, run_kubectl

LAST = "~"  # sorts after every character that a label may begin with
FILE = "levels.json"  # in RUN_DIR/launch: node -> network location


def write_places(run_dir: Path, levels: Sequence[str]) -> None:
    """Write the network locations of all nodes to levels.json; without levels, remove it. Raises UserError."""
    path = jobs.make_launch_folder(run_dir) / FILE
    if not levels:
        path.unlink(missing_ok=True)  # left by an earlier submit
        return
    try:
        nodes = json.loads(run_kubectl("get", "nodes", "--output", "json"))["items"]
    except (KubectlError, ValueError, KeyError) as error:
        raise UserError(
            f"launch.levels: kubectl cannot read the labels of nodes: {error}.",
            "launch.levels orders ranks by node labels, so kubectl needs permission to list nodes.",
            "Without launch.levels, ranks follow the order in which the pods were placed.",
        ) from error
    labels = {node["metadata"]["name"]: node["metadata"].get("labels", {}) for node in nodes}
    for level in levels:
        if not any(level in of_node for of_node in labels.values()):
            raise UserError(
                f"launch.levels={level}: all nodes lack this label.",
                "To list the labels of nodes:  kubectl get nodes --show-labels",
            )
    places = {name: make_place(name, of_node, levels) for name, of_node in labels.items()}
    write_whole(path, json.dumps(places, indent=2) + "\n")


def make_place(name: str, labels: dict[str, str], levels: Sequence[str]) -> str:
    """Return a node's network location, "zone-a.rack7.node-3": its label values, widest first, then its name."""
    return ".".join(word.replace(".", "-") for word in (*(labels.get(level, "") for level in levels), name))


def find_place(run_dir: Path, name: str) -> str:
    """Return a node's network location; "" without launch.levels. A node added after the submit sorts last."""
    if not (places := read_places(run_dir)):
        return ""
    if name not in places:
        print(
            f"train: launch.levels: node {name} is newer than the submit: its labels are unknown, its ranks come last",
            file=sys.stderr,
            flush=True,
        )
        return f"{LAST}.{name.replace('.', '-')}"
    return places[name]


def read_places(run_dir: Path) -> dict[str, str]:
    """Return node -> network location; {} if launch.levels was not set."""
    path = Path(run_dir, jobs.FOLDER, FILE)
    return json.loads(read_regular(path)) if path.exists() else {}
