"""State of a rank in a pool: its index, the world size, and its Comms over any mesh of `world` ranks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gangline.comm.base import Comms
from gangline.mesh import Mesh
from gangline.storage.files import write_whole
from gangline_testkit.ship import unpack

index = 0  # index of this process among the ranks of its pool
world = 1

# Texts in errors of the transport after the connection to another rank is lost.
_LOST_PEER = ("closed by peer", "Connection reset", "Timed out waiting", "timed out connecting")

_comms: dict[tuple[Mesh, bool], Comms] = {}


@dataclass(frozen=True)
class Failure:
    """Exception of a rank, in a form that can be pickled."""

    pickled: bytes | None  # the exception itself; None if it cannot be pickled
    name: str
    trace: str
    time: float
    of_a_peer: bool  # whether the error follows from the failure of another rank

    def make_error(self, rank: int, of: int) -> BaseException:
        """Return the exception for the calling process, with the rank number and the rank's traceback as a note."""
        error: BaseException
        try:
            error = pickle.loads(self.pickled) if self.pickled else RuntimeError(self.name)
        except Exception:
            error = RuntimeError(self.name)
        error.add_note(f"traceback of rank {rank} of {of}:\n{self.trace}")
        return error


def make_comms(mesh: Mesh, deterministic: bool = True) -> Comms:
    """Return the Comms over `mesh` on the open process group, created once per mesh and cached.

    Raises ValueError if the mesh and the pool have different numbers of ranks.
    """
    from gangline.comm.transport import connect

    if mesh.world != world:
        raise ValueError(f"the mesh has {mesh.world} ranks, and the pool has {world} ranks")
    key = (mesh, deterministic)
    if key not in _comms:
        _comms[key] = connect(
            mesh, device=torch.device("cpu"), deterministic=deterministic, timeout=timedelta(seconds=240)
        )
    return _comms[key]


def serve(rank: int, of: int, place: str, pipe: Connection) -> None:
    """Join the process group as a rank, then run the functions that arrive on the pipe until the pipe closes."""
    global index, world
    index, world = rank, of
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process handles Ctrl-C and kills the ranks
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(of), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(of))
    if of > 1:
        import torch.distributed as dist

        limit = timedelta(seconds=240)
        dist.init_process_group("gloo", store=_meet(Path(place), limit), rank=rank, world_size=of, timeout=limit)
    while True:
        try:
            parcel = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        pipe.send_bytes(_answer(parcel))


def _meet(place: Path, limit: timedelta) -> Any:
    """Return the pool's TCPStore: rank 0 serves it on a free port, and the other ranks read the port from a file."""
    from torch.distributed import TCPStore

    if index == 0:
        store = TCPStore("127.0.0.1", 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        write_whole(place, str(store.port), durable=False)
        return store
    while not place.exists():
        time.sleep(0.002)
    return TCPStore("127.0.0.1", int(place.read_text()), world, timeout=limit, wait_for_workers=False)


def _answer(parcel: Any) -> bytes:
    try:
        function, args = unpack(parcel)
        return pickle.dumps(function(*args))
    except BaseException as error:  # including that of pytest.fail, which is not an Exception
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # fails for exceptions whose constructor has other arguments
        except Exception:
            pickled = None
        text = str(error)
        of_a_peer = any(words in text for words in _LOST_PEER)
        name = f"{type(error).__name__}: {text}"
        return pickle.dumps(Failure(pickled, name, traceback.format_exc(), time.time(), of_a_peer))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
