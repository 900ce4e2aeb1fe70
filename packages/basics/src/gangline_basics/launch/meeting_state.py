"""State of torch's dynamic rendezvous as JSON. torch's own pickle of the state is never written to a file."""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from gangline_basics.launch.placed import PlacedAddress


def encode(pickled: bytes) -> bytes:
    """Return the JSON of a state that torch has pickled in this process."""
    state: _RendezvousState = pickle.loads(pickled)
    content = {
        "round": state.round,
        "complete": state.complete,
        "deadline": state.deadline and state.deadline.isoformat(),
        "closed": state.closed,
        "participants": [[*_get_fields(node), rank] for node, rank in state.participants.items()],
        "wait_list": sorted(map(_get_fields, state.wait_list)),
        "redundancy_list": sorted(map(_get_fields, state.redundancy_list)),
        "last_heartbeats": [[*_get_fields(node), beat.isoformat()] for node, beat in state.last_heartbeats.items()],
    }
    return json.dumps(content).encode()


def decode(content: bytes) -> _RendezvousState:
    """Return the state that `encode` wrote. Raises ValueError for any other content."""
    state = _RendezvousState()
    try:
        record = json.loads(content)
        state.round, state.complete, state.closed = (
            int(record["round"]),
            bool(record["complete"]),
            bool(record["closed"]),
        )
        state.deadline = datetime.fromisoformat(record["deadline"]) if record["deadline"] else None
        state.participants = {_make_node(*fields): int(rank) for *fields, rank in record["participants"]}
        state.wait_list = {_make_node(*fields) for fields in record["wait_list"]}
        state.redundancy_list = {_make_node(*fields) for fields in record["redundancy_list"]}
        state.last_heartbeats = {
            _make_node(*fields): datetime.fromisoformat(beat) for *fields, beat in record["last_heartbeats"]
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"invalid state of a rendezvous: {error!r}") from error
    return state


def _get_fields(node: _NodeDesc) -> tuple[str, str, int, int]:
    return str(node.addr), getattr(node.addr, "place", ""), node.pid, node.local_id


def _make_node(addr: Any, place: Any, pid: Any, local_id: Any) -> _NodeDesc:
    return _NodeDesc(PlacedAddress(str(addr), str(place)) if place else str(addr), int(pid), int(local_id))
