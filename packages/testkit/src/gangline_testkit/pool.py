"""Pools of ranks that are forked once and reused, with an open process group: a multi-rank test takes milliseconds.

    def body(scale):                                  # module-level, in the test file itself
        comm = rank.make_comms(Mesh.of({"dp_shard": rank.world})).get_comm("dp_shard")
        return comm.all_reduce(torch.ones(3) * scale)

    def test_sums():
        assert get_pool(4).run(body, 2.0)[0].tolist() == [8, 8, 8]

A fork server with torch loaded forks the ranks. The server never runs a torch operation, because the fork of a process
that has used OpenMP, such as the process of the tests, hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from gangline_basics.launch.forkserver import drop
from gangline_testkit.rank import Failure, serve
from gangline_testkit.ship import pack

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "torch.distributed.checkpoint",
    "numpy",
    "gangline.plugin.builtin",
    "gangline.comm.transport",
    "gangline_basics.model.decoder",
    "gangline_testkit.rank",
]
GRACE_SECONDS = 2.0  # seconds for the other ranks to report after the first failure

_pools: dict[int, Pool] = {}
_server: int | None = None  # process id of the fork server that has loaded PRELOAD


class PoolBroken(RuntimeError):
    """Error: a rank died or did not answer in time. The next `get_pool(world)` starts new ranks."""


class Pool:
    """Pool of `world` processes, one per rank, which run the functions of tests."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.broken = False
        self._directory = tempfile.mkdtemp(prefix="gangline-pool-")
        context = multiprocessing.get_context("forkserver")
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, world, str(Path(self._directory, "port")), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, for tests that kill one."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, function: Callable, *args: Any, timeout: float = 300.0, grace: float = GRACE_SECONDS) -> list[Any]:
        """Call `function(*args)` on every rank, and return the results in rank order.

        `function` and the types of `args` must be defined at module level, in an importable module or in the test file.
        If ranks fail, raises the exception of the first failed rank, with its rank number and traceback as a note.
        Raises PoolBroken if a rank died, or did not answer within `timeout` seconds. After a failure the other ranks
        have `grace` seconds to report, and the pool is discarded, because its ranks may wait in a collective.
        """
        parcel = pickle.dumps(pack((function, args)))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # the rank has died; the wait below detects it
                pipe.send_bytes(parcel)
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        dead: list[int] = []
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(self._pipes))
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            ready = connection.wait(list(waiting.values()), seconds)
            for rank, pipe in [(rank, pipe) for rank, pipe in waiting.items() if pipe in ready]:
                del waiting[rank]
                try:
                    answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    dead.append(rank)
                else:
                    (failures if isinstance(answer, Failure) else results)[rank] = answer
            if failures or dead:
                deadline = min(deadline, time.monotonic() + grace)
        if len(results) == self.world:
            return [results[rank] for rank in range(self.world)]
        self.close()
        if dead:
            details = "".join(f"\nrank {rank}: {failure.name}" for rank, failure in failures.items())
            raise PoolBroken(f"ranks {', '.join(map(str, dead))} of {self.world} died{details}")
        if failures:
            rank, failure = min(failures.items(), key=lambda item: (item[1].of_a_peer, item[1].time))
            raise failure.make_error(rank, self.world)
        raise PoolBroken(f"ranks {', '.join(map(str, waiting))} of {self.world} did not answer within {timeout:g} s")

    def close(self) -> None:
        """Kill the ranks."""
        if self.broken:
            return
        self.broken = True
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # the fork server has already reaped the process
                    os.kill(process.pid, signal.SIGKILL)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def get_pool(world: int) -> Pool:
    """Return the shared pool of `world` ranks; starts a new pool on first use and if the ranks have died."""
    pool = _pools.get(world)
    if pool is None or pool.broken or not all(process.is_alive() for process in pool._processes):
        if pool is not None:
            pool.close()
        _start_server()
        pool = _pools[world] = Pool(world)
    return pool


def close_all() -> None:
    """Close every pool; the next `get_pool` starts new ranks."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _start_server() -> None:
    """Start the fork server with OMP_NUM_THREADS=1, which libgomp reads when it is loaded in the server.

    Stops a fork server that other code of this process has started, such as a launcher: that server lacks the modules
    of PRELOAD, so that each rank would import them.
    """
    global _server
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    if server._forkserver_pid not in (None, _server):
        close_all()
        drop()
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        multiprocessing.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
        _server = server._forkserver_pid
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


atexit.register(close_all)
