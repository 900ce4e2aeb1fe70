"""Inside a rank of the pool: who this is, and its communication over any mesh of the pool's size."""

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

index = 0  # of this process among the ranks of its pool
world = 1

# What the transport says where it lost another rank.
_LOST_PEER = ("closed by peer", "Connection reset", "Timed out waiting", "timed out connecting")

_comms: dict[tuple[Mesh, bool], Comms] = {}


@dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    pickled: bytes | None  # the exception itself, where it can travel
    name: str
    trace: str
    time: float
    of_a_peer: bool  # the transport lost another rank: that one has the reason

    def make_error(self, rank: int, of: int) -> BaseException:
        """The exception to raise in the process that asked, with the rank's traceback."""
        error: BaseException
        try:
            error = pickle.loads(self.pickled) if self.pickled else RuntimeError(self.name)
        except Exception:
            error = RuntimeError(self.name)
        error.add_note(f"on rank {rank} of {of}:\n{self.trace}")
        return error


def make_comms(mesh: Mesh, deterministic: bool = True) -> Comms:
    """Communication over `mesh`, on the open process group; made once for each mesh and kept.

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
    """The life of a rank: join the process group, then run what comes through the pipe until it closes."""
    global index, world
    index, world = rank, of
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test runner's business; it ends the ranks
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
    """The pool's store: rank 0 serves it on a free port, which it tells the others through a file."""
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
    except BaseException as error:  # also pytest.fail, which is no Exception
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # an exception with a signature of its own travels one way only
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
