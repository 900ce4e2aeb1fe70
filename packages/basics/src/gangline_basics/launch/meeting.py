"""Rendezvous of the agents of a job: torch's dynamic rendezvous, with its state in a file of the run directory.

The file system outlives every node, so no agent holds state that the others need. torch's own c10d store is in the
process of one agent, and is lost with that agent.
"""

from __future__ import annotations

import os
import pickle
import stat
import time
import uuid
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from glob import escape
from pathlib import Path
from shlex import quote as quote_word
from typing import Any
from urllib.parse import quote

from torch.distributed import FileStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
    _RendezvousExitOp,
    _RendezvousState,
)

from gangline.errors import UserError
from gangline.run.lock import MEETING
from gangline.storage.files import lock_file, open_handle, read_regular, write_whole
from gangline_basics.launch import meeting_state
from gangline_basics.launch.config import ElasticLaunch
from gangline_basics.launch.nodes import parse_nodes

BEATS = 4  # number of missed heartbeats after which a node is lost
CLOSE_SECONDS = 5.0
STORE_SECONDS = 20.0  # timeout in seconds for a key that another node of the start sets
_NAMES = "gangline/names"  # prefix of the nodes' names in the job's store
REGATHER_SECONDS = 1.0  # maximum wait in seconds for nodes beyond the minimum, after the first start


class FileBackend(RendezvousBackend):
    """State of a rendezvous as JSON in one file. The content of the file is the fencing token of its state.

    The file is replaced atomically. With a partial file, all nodes would join again in round 0, and read values of an
    earlier round from the store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return "file"

    def get_state(self) -> tuple[bytes, Token] | None:
        content = self._read_locked()
        return (self._dump(content), content) if content else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        with self._lock():
            there = self._read()
            if (there or None) != token:
                return (self._dump(there), there, False) if there else None
            content = meeting_state.encode(state)
            temporary = f"stnew-{self.path.name}"  # a fixed name is enough, because the lock admits one writer
            write_whole(self.path, content, mode=0o600, durable=False, temporary=temporary)
            return state, content, True

    def read(self) -> _RendezvousState | None:
        """Return the state, or None before the first node has joined."""
        content = self._read_locked()
        return self._decode(content) if content else None

    def _dump(self, content: bytes) -> bytes:
        """Return the state as torch reads it: a pickle made in this process."""
        return pickle.dumps(self._decode(content))

    def _decode(self, content: bytes) -> _RendezvousState:
        try:
            return meeting_state.decode(content)
        except ValueError as error:
            raise UserError(
                f"{self.path}: {error}",
                "The nodes of this run find each other through that file.",
                f"If no node of the run is active, delete the rendezvous:  rm -r {quote_word(str(self.path.parent))}",
            ) from error

    def _read_locked(self) -> bytes:
        with self._lock():
            return self._read()

    def _read(self) -> bytes:
        try:
            handle = open_handle(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return b""
        with os.fdopen(handle, "rb") as file:
            return file.read()

    def _lock(self) -> AbstractContextManager[None]:
        return lock_file(self.path.with_name(f"stlock-{self.path.name}"), mode=0o600)


class Patience(RendezvousTimeout):
    """Rendezvous timeouts: the first start of a job waits for all nodes, later starts use the nodes present."""

    later = False

    def has_met(self) -> None:
        """Record that the first rendezvous of the job is complete."""
        self.later = True

    @property
    def last_call(self) -> timedelta:
        return timedelta(seconds=REGATHER_SECONDS) if self.later else super().last_call


@dataclass
class JobMeeting:
    """Rendezvous of the nodes of one job: members of the current start, and a store that outlives the job's starts."""

    handler: DynamicRendezvousHandler
    store: FileStore
    patience: Patience
    backend: FileBackend
    lost_seconds: float
    own: str = ""  # name of this node
    members: frozenset[Any] = frozenset()  # members of the current start

    def record_members(self) -> None:
        """Record the members of a start, after its rendezvous."""
        self.patience.has_met()
        # the node sends heartbeats now, which replace the announcement
        self._make_wait_path(self.own).unlink(missing_ok=True)
        state = self.backend.read()
        self.members = frozenset(state.participants) if state else frozenset()

    def list_replaced(self) -> set[str]:
        """Return the names of members of the current start that were lost, and whose new agent waits to join."""
        state = self.backend.read()
        if state is None:
            return set()
        new = {*state.participants, *state.wait_list, *state.redundancy_list} - self.members
        return self._list_names(new) & self._list_names(self.members)

    def name(self, name: str) -> None:
        """Set the name of this node, before it joins."""
        self.own = name
        self.store.set(f"{_NAMES}/{self._me}", name)

    def list_others(self) -> set[str]:
        """Return the names of the live nodes except this node."""
        state = self.backend.read()
        since = datetime.now(UTC) - timedelta(seconds=self.lost_seconds)
        there = {node for node, beat in state.last_heartbeats.items() if beat >= since} if state else set()
        return self._list_names(there - {self._me})

    def _list_names(self, nodes: Iterable[Any]) -> set[str]:
        """Return the names of `nodes`, except nodes that have not set a name."""
        keys = [f"{_NAMES}/{node}" for node in nodes]
        return {self.store.get(key).decode() for key in keys if self.store.check([key])}

    def leave(self) -> None:
        """Leave the rendezvous of the start that has ended, so that other nodes need not wait for a timeout."""
        handler: Any = self.handler
        handler._stop_heartbeats()
        handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + CLOSE_SECONDS)

    def mark_waiting(self) -> None:
        """Announce in a file that this node is in no start, and can take part in the next one.

        A file is used because keys of the store never expire. The announcement is valid until the node's next
        rendezvous, or for `lost_seconds`.
        """
        temporary = f"stnew-{uuid.uuid4().hex}"
        write_whole(self._make_wait_path(self.own), f"{self.own}\n{time.time()}", durable=False, temporary=temporary)

    def list_waiting(self) -> set[str]:
        """Return the names of the nodes with a valid announcement of `mark_waiting`, including this node."""
        names, since = set(), time.time() - self.lost_seconds
        for path in self.backend.path.parent.glob(f"{escape(self._waiting)}*"):
            with suppress(FileNotFoundError):  # the node has just completed a rendezvous
                name, beat = read_regular(path).decode().split("\n")
                if float(beat) >= since:
                    names.add(name)
        return names

    def check_open(self) -> None:
        """Raise RendezvousClosedError if the job is over."""
        state = self.backend.read()
        if state is not None and state.closed:
            raise RendezvousClosedError("the job is over")

    @property
    def _waiting(self) -> str:
        return f"stwaits-{self.backend.path.name}-"

    def _make_wait_path(self, name: str) -> Path:
        return self.backend.path.with_name(f"{self._waiting}{quote(name, safe='')}")

    @property
    def _me(self) -> Any:
        return self.handler._this_node


def _make_private_folder(folder: Path) -> Path:
    """Return the folder of the rendezvous, writable only by this user. Raises UserError if another user owns it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    probe = folder / f"stnew-{uuid.uuid4().hex}"
    # the probe tells the reported owner of own files: some file systems report one owner for all files
    probe.touch(0o600)
    own_uid, there = probe.stat().st_uid, folder.lstat()
    probe.unlink()
    if there.st_uid != own_uid or not stat.S_ISDIR(there.st_mode):
        raise UserError(
            f"{folder} must be a directory of user {own_uid}, and its owner is user {there.st_uid}",
            "A user who can write to the rendezvous directory controls which nodes take part in this run.",
            f"If no node of the run is active, delete the rendezvous:  rm -r {quote_word(str(folder))}",
        )
    if there.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def meet_in(run_dir: Path, job: str, address: str, config: ElasticLaunch) -> JobMeeting:
    """Return the rendezvous of the nodes of `job`."""
    folder = _make_private_folder(run_dir / MEETING)
    store = FileStore(str(folder / f"store-{job}"))
    store.set_timeout(timedelta(seconds=STORE_SECONDS))
    fewest, most = parse_nodes(config.nodes)
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
        keep_alive_interval=config.lost_seconds / BEATS,  # type: ignore[arg-type]  # a float works too
        keep_alive_max_attempt=BEATS,
    )
    return JobMeeting(handler, store, patience, backend, config.lost_seconds)
