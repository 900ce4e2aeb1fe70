"""Where the agents of a job meet: torch's dynamic rendezvous, with its state in a file of the run directory.

The file system outlives every node, so no agent holds what the others need: torch's own c10d store lives in one of
them, and is gone with it.
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

BEATS = 4  # heartbeats until a node without one is lost
CLOSE_SECONDS = 5.0
STORE_SECONDS = 20.0  # how long a member of a start waits for a word of another one
_NAMES = "gangline/names"  # of the nodes, in the job's store
REGATHER_SECONDS = 1.0  # after the first start: how long nodes beyond the fewest are waited for


class FileBackend(RendezvousBackend):
    """The state of a rendezvous as JSON in one file, replaced as a whole; its content is its own fencing token.

    With a torn file all nodes would join again in round 0, and read an old round's values from the store.
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
            temporary = f"stnew-{self.path.name}"  # under the lock: one at a time
            write_whole(self.path, content, mode=0o600, durable=False, temporary=temporary)
            return state, content, True

    def read(self) -> _RendezvousState | None:
        """Return the state, None before the first node has joined."""
        content = self._read_locked()
        return self._decode(content) if content else None

    def _dump(self, content: bytes) -> bytes:
        """What torch reads: a pickle of the state, made in this process."""
        return pickle.dumps(self._decode(content))

    def _decode(self, content: bytes) -> _RendezvousState:
        try:
            return meeting_state.decode(content)
        except ValueError as error:
            raise UserError(
                f"{self.path}: {error}",
                "The nodes of this run cannot find each other by it.",
                f"To remove it, when no node of the run is active:  rm -r {quote_word(str(self.path.parent))}",
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

    def record_members(self) -> None:
        """The nodes of a start are together."""
        self.patience.has_met()
        self._make_wait_path(self.own).unlink(missing_ok=True)  # heartbeats tell of this node from now on
        state = self.backend.read()
        self.members = frozenset(state.participants) if state else frozenset()

    def list_replaced(self) -> set[str]:
        """Members of the start under way whose agent is gone, and its ranks with it: another of their name waits."""
        state = self.backend.read()
        if state is None:
            return set()
        new = {*state.participants, *state.wait_list, *state.redundancy_list} - self.members
        return self._list_names(new) & self._list_names(self.members)

    def name(self, name: str) -> None:
        """Say who this node is; before it joins."""
        self.own = name
        self.store.set(f"{_NAMES}/{self._me}", name)

    def list_others(self) -> set[str]:
        """The names of the nodes that are heard of, without this one."""
        state = self.backend.read()
        since = datetime.now(UTC) - timedelta(seconds=self.lost_seconds)
        there = {node for node, beat in state.last_heartbeats.items() if beat >= since} if state else set()
        return self._list_names(there - {self._me})

    def _list_names(self, nodes: Iterable[Any]) -> set[str]:
        """Of those that have said their name."""
        keys = [f"{_NAMES}/{node}" for node in nodes]
        return {self.store.get(key).decode() for key in keys if self.store.check([key])}

    def leave(self) -> None:
        """The others need not find out that this node has left the start that ends."""
        handler: Any = self.handler
        handler._stop_heartbeats()
        handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + CLOSE_SECONDS)

    def mark_waiting(self) -> None:
        """This node is no member of a start, and would take part in one. A file, for the store forgets nothing.

        It counts until the node has met the others, or for `lost_seconds`.
        """
        temporary = f"stnew-{uuid.uuid4().hex}"
        write_whole(self._make_wait_path(self.own), f"{self.own}\n{time.time()}", durable=False, temporary=temporary)

    def list_waiting(self) -> set[str]:
        """The names of the nodes that wait, this one too."""
        names, since = set(), time.time() - self.lost_seconds
        for path in self.backend.path.parent.glob(f"{escape(self._waiting)}*"):
            with suppress(FileNotFoundError):  # it has just met the others
                name, beat = read_regular(path).decode().split("\n")
                if float(beat) >= since:
                    names.add(name)
        return names

    def check_open(self) -> None:
        """Raises RendezvousClosedError where the job is over."""
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
    """The folder of the meeting, which this user alone may write to. Raises UserError where others could."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    probe = folder / f"stnew-{uuid.uuid4().hex}"
    probe.touch(0o600)  # a file system may show one owner for all files; it then does for this one
    own_uid, there = probe.stat().st_uid, folder.lstat()
    probe.unlink()
    if there.st_uid != own_uid or not stat.S_ISDIR(there.st_mode):
        raise UserError(
            f"{folder} belongs to user {there.st_uid}, and this is user {own_uid}",
            "Whoever writes there decides which nodes this run consists of.",
            f"To remove it, when no node of the run is active:  rm -r {quote_word(str(folder))}",
        )
    if there.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def meet_in(run_dir: Path, job: str, address: str, config: ElasticLaunch) -> JobMeeting:
    """The meeting of the nodes of `job`."""
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
        keep_alive_interval=config.lost_seconds / BEATS,  # type: ignore[arg-type]  # a float serves as well
        keep_alive_max_attempt=BEATS,
    )
    return JobMeeting(handler, store, patience, backend, config.lost_seconds)
