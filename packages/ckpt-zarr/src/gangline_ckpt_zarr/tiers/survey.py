"""Survey of the memory tier when workers start: one rank asks the nodes of the job, and all ranks use its result.

A checkpoint is complete if each of its files is on some node, whatever ranks run there now: a node of this start, or a
node whose agent was lost and whose keeper waits for the next agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gangline import BadCheckpoint
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.format import zarr_json
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.tiers.completeness import find_file_error

Held = Mapping[str, int]  # size in bytes of each file of a node, by path


@dataclass(frozen=True)
class Survivor:
    """A checkpoint that can be loaded: the write id of its save, and the node and size of each of its files."""

    id: CheckpointId
    write_id: str
    nodes: dict[str, str]
    sizes: dict[str, int]


def find_survivors(
    held: Mapping[str, Held], read: Callable[[str, str], bytes]
) -> tuple[list[Survivor], dict[CheckpointId, str]]:
    """Return (checkpoints that can be loaded, oldest first; why newer checkpoints cannot be loaded).

    `held`: files by node, nearest node first. `read(node, path)` returns a small file of a node.
    """
    ids = sorted({id for files in held.values() for path in files if (id := _parse_id(path)) is not None})
    survivors: list[Survivor] = []
    reasons: dict[CheckpointId, str] = {}
    for id in ids:
        one = _find_survivor(id, held, read)
        if isinstance(one, Survivor):
            survivors.append(one)
            reasons.clear()  # report only checkpoints newer than this one: older ones were being replaced
        else:
            reasons[id] = one
    return survivors, reasons


def _find_survivor(id: CheckpointId, held: Mapping[str, Held], read: Callable[[str, str], bytes]) -> Survivor | str:
    nodes: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for node, files in held.items():
        for path, size in files.items():
            if path.startswith(f"{id}/") and path not in nodes:
                nodes[path], sizes[path] = node, size
    write_ids, why = set(), ""
    for node, files in held.items():
        if f"{id}/{NAME}" not in files:
            continue
        try:
            meta = zarr_json.read(read(node, f"{id}/{NAME}"), f"{id}/{NAME} on node {node}", id)
        except (BadCheckpoint, OSError) as error:
            why = why or str(error)
            continue
        if meta.write_id in write_ids:
            continue
        write_ids.add(meta.write_id)
        nodes[f"{id}/{NAME}"], sizes[f"{id}/{NAME}"] = node, files[f"{id}/{NAME}"]
        lacks = find_file_error(meta, {path.removeprefix(f"{id}/"): size for path, size in sizes.items()})
        if not lacks:
            paths = {f"{id}/{NAME}", *(f"{id}/{meta.get_file_path(rank)}" for rank in meta.iterate_writers())}
            own = {path: node for path, node in nodes.items() if path in paths}
            return Survivor(id, meta.write_id, own, {path: sizes[path] for path in own})
        why = why or lacks
    return why


def _parse_id(path: str) -> CheckpointId | None:
    name, _, rest = path.partition("/")
    return CheckpointId.parse(name) if rest == NAME else None
