"""Key-value store of a job, which rank 0 serves at one address only."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from weakref import WeakValueDictionary

from torch.distributed import TCPStore

from gangline.launch.network import find_listening_address

ADDRESS = "GANGLINE_STORE_ADDRESS"  # listening address, set by rank 0's agent or the user; "0.0.0.0": all interfaces
_BACKLOG = 16384  # maximum number of waiting connections: ranks connect at once
_ANYWHERE = ("", "0.0.0.0", "::")

_served: WeakValueDictionary[int, TCPStore] = WeakValueDictionary()  # stores served by this process, by port


def open_job_store(timeout: timedelta, waits: bool = True, environ: Mapping[str, str] = os.environ) -> TCPStore:
    """Open the store of the job that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Rank 0 serves the store, unless torchrun's agent does. It listens at the loopback interface if MASTER_ADDR is a
    loopback address, else at the address that MASTER_ADDR resolves to on this machine, and at all interfaces only if
    this address is unknown. The store has no authentication. A second call in the same process shares the server of the
    first call.

    timeout: timeout of each wait for a key. waits: whether rank 0 returns only when all ranks have connected.
    """
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    name, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = rank == 0 and not by_agent and port not in _served
    address = environ.get(ADDRESS) or (find_listening_address(name) if serves else "")
    store = TCPStore(
        name if address in _ANYWHERE or by_agent else address,
        port,
        world,
        is_master=serves,
        timeout=timeout,
        wait_for_workers=waits,
        multi_tenant=True,  # torch's env:// rendezvous in this process shares the server
        master_listen_fd=_listen(address, port) if serves and address not in _ANYWHERE else None,
    )
    if serves:
        _served[port] = store
    return store


def _listen(address: str, port: int) -> int:
    """Return a file descriptor that listens at `address`; the store closes it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG).detach()
