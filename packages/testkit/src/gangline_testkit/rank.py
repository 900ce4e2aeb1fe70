"""State of a rank of the pool: its index, the world size, and its Comms over any mesh of the pool's size."""

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

# Error texts of the transport after it lost another rank.
_LOST_PEER = ("closed by peer", "Connection reset", "Timed out waiting", "timed out connecting")

_comms: dict[tuple[Mesh, bool], Comms] = {}


@dataclass(frozen=True)
class Failure:
    """An exception that a rank raised, in a form that can be sent."""

    pickled: bytes | None  # the exception itself; None if it cannot be pickled
    name: str
    trace: str
    time: float
    of_a_peer: bool  # the transport lost another rank, which has the cause

    def make_error(self, rank: int, of: int) -> BaseException:
        """Return the exception to raise in the calling process, with the rank's traceback as a note."""
        error: BaseException
        try:
            error = pickle.loads(self.pickled) if self.pickled else RuntimeError(self.name)
        except Exception:
            error = RuntimeError(self.name)
        error.add_note(f"on rank {rank} of {of}:\n{self.trace}")
        return error


def make_comms(mesh: Mesh, deterministic: bool = True) -> Comms:
    """Return the Comms over `mesh` on the open process group, created once for each mesh and kept.

    Raises ValueError for a mesh of another size than the pool.
    """
    from gangline.comm.transport import connect

    if mesh.world != world:
        raise ValueError(f"a mesh of {mesh.world} ranks in a pool of {world}")
    key = (mesh, deterministic)
    if key not in _comms:
        _comms[key] = connect(
            mesh, device=torch.device("cpu"), deterministic=deterministic, timeout=timedelta(seconds=240)
        )
    return _comms[key]


def serve(rank: int, of: int, place: str, pipe: Connection) -> None:
    """Join the process group as a rank, then run what comes through the pipe until it closes."""
    global index, world
    index, world = rank, of
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test runner handles Ctrl-C and ends the ranks
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
    """Return the pool's store: rank 0 serves it on a free port, which it writes to a file that the others read."""
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
    except BaseException as error:  # also pytest.fail, which does not raise an Exception
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # fails for an exception with its own signature
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
