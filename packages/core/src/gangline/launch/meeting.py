"""Where the agents of a job meet: torch's dynamic rendezvous, with its state in a file of the run directory.

The file system outlives every node, so no agent holds what the others need: torch's own c10d store lives in one of
them, and is gone with it.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from glob import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch.distributed import FileStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
    _RendezvousExitOp,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from gangline.launch.config import ElasticLaunch
from gangline.launch.nodes import fewest_and_most
from gangline.run_lock import MEETING

BEATS = 4  # heartbeats until a node without one is lost
CLOSE_SECONDS = 5.0
STORE_SECONDS = 20.0  # how long a member of a start waits for a word of another one
_NAMES = "gangline/names"  # of the nodes, in the job's store
REGATHER_SECONDS = 1.0  # after the first start: how long nodes beyond the fewest are waited for


class FileBackend(RendezvousBackend):
    """The state of a rendezvous in one file, replaced whole; its content is its own fencing token.

    A torn one would make all join anew in round 0, and take an old round's words from the store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return "file"

    def get_state(self) -> tuple[bytes, Token] | None:
        with self._locked():
            return self._read()

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        with self._locked():
            there = self._read()
            if (there[1] if there else None) != token:
                return (*there, False) if there else None
            new = self.path.with_name(f"stnew-{self.path.name}")  # under the lock: one at a time
            new.write_bytes(state)
            os.replace(new, self.path)
            return state, state, True

    def _read(self) -> tuple[bytes, Token] | None:
        content = self.path.read_bytes() if self.path.exists() else b""
        return (content, content) if content else None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.path.with_name(f"stlock-{self.path.name}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


class Patience(RendezvousTimeout):
    """The first start of a job waits for all nodes, a later one goes on with the nodes that are there."""

    later = False

    def has_met(self) -> None:
        """The first start has its nodes."""
        self.later = True

    @property
    def last_call(self) -> timedelta:
        return timedelta(seconds=REGATHER_SECONDS) if self.later else super().last_call


@dataclass
class JobMeeting:
    """The meeting of the nodes of one job: what makes up a start, and a store that outlives its starts."""

    handler: DynamicRendezvousHandler
    store: FileStore
    patience: Patience
    backend: FileBackend
    lost_seconds: float
    own: str = ""  # the name of this node
    members: frozenset[Any] = frozenset()  # of the start under way

    def met(self) -> None:
        """The nodes of a start are together."""
        self.patience.has_met()
        self._waits_in(self.own).unlink(missing_ok=True)  # heartbeats tell of this node from now on
        state = self._state()
        self.members = frozenset(state.participants) if state else frozenset()

    def replaced(self) -> set[str]:
        """Members of the start under way whose agent is gone, and its ranks with it: another of their name waits."""
        state = self._state()
        if state is None:
            return set()
        new = {*state.participants, *state.wait_list, *state.redundancy_list} - self.members
        return self._names(new) & self._names(self.members)

    def name(self, name: str) -> None:
        """Say who this node is; before it joins."""
        self.own = name
        self.store.set(f"{_NAMES}/{self._me}", name)

    def others(self) -> set[str]:
        """The names of the nodes that are heard of, without this one."""
        state = self._state()
        since = datetime.now(UTC) - timedelta(seconds=self.lost_seconds)
        there = {node for node, beat in state.last_heartbeats.items() if beat >= since} if state else set()
        return self._names(there - {self._me})

    def _names(self, nodes: Iterable[Any]) -> set[str]:
        """Of those that have said their name."""
        keys = [f"{_NAMES}/{node}" for node in nodes]
        return {self.store.get(key).decode() for key in keys if self.store.check([key])}

    def leave(self) -> None:
        """The others need not find out that this node has left the start that ends."""
        handler: Any = self.handler
        handler._stop_heartbeats()
        handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + CLOSE_SECONDS)

    def waits(self) -> None:
        """This node is no member of a start, and would take part in one. A file, for the store forgets nothing.

        It counts until the node has met the others, or for `lost_seconds`.
        """
        new = self.backend.path.with_name(f"stnew-{uuid.uuid4().hex}")
        new.write_text(f"{self.own}\n{time.time()}")
        os.replace(new, self._waits_in(self.own))

    def waiting(self) -> set[str]:
        """The names of the nodes that wait, this one too."""
        found, since = set(), time.time() - self.lost_seconds
        for path in self.backend.path.parent.glob(f"{escape(self._waiting)}*"):
            with suppress(FileNotFoundError):  # it has just met the others
                name, beat = path.read_text().split("\n")
                if float(beat) >= since:
                    found.add(name)
        return found

    def check_open(self) -> None:
        """Raises RendezvousClosedError where the job is over."""
        state = self._state()
        if state is not None and state.closed:
            raise RendezvousClosedError("the job is over")

    @property
    def _waiting(self) -> str:
        return f"stwaits-{self.backend.path.name}-"

    def _waits_in(self, name: str) -> Path:
        return self.backend.path.with_name(f"{self._waiting}{quote(name, safe='')}")

    @property
    def _me(self) -> Any:
        return self.handler._this_node

    def _state(self) -> Any:
        state = self.backend.get_state()
        return None if state is None else pickle.loads(state[0])


def meet_in(run_dir: Path, job: str, address: str, config: ElasticLaunch) -> JobMeeting:
    """The meeting of the nodes of `job`."""
    folder = run_dir / MEETING
    folder.mkdir(exist_ok=True)
    store = FileStore(str(folder / f"store-{job}"))
    store.set_timeout(timedelta(seconds=STORE_SECONDS))
    fewest, most = fewest_and_most(config.nodes)
    patience = Patience(
        join=timedelta(seconds=config.join_seconds),
        last_call=timedelta(seconds=config.gather_seconds),
        close=timedelta(seconds=CLOSE_SECONDS),
    )
    backend = FileBackend(folder / f"state-{job}")
    handler = DynamicRendezvousHandler.from_backend(
        job,
        store,
        backend,
        fewest,
        most,
        address,
        patience,
        keep_alive_interval=config.lost_seconds / BEATS,  # type: ignore[arg-type]  # a float serves as well
        keep_alive_max_attempt=BEATS,
    )
    return JobMeeting(handler, store, patience, backend, config.lost_seconds)


def alone() -> RendezvousHandler:
    """The rendezvous of an agent that has the job to itself."""
    return get_rendezvous_handler(
        RendezvousParameters("c10d", "127.0.0.1:0", uuid.uuid4().hex, 1, 1, local_addr="127.0.0.1")
    )
