"""The process beside a node's ranks that keeps its memory tier while workers and agents come and go. Torch-free.

It gives its files to other nodes and keeps copies of theirs. Where the node's agent was killed it waits for the next
one's keeper, which takes the directory over; nobody deletes what somebody else has taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import mmap
import os
import secrets
import shutil
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import Any

from gangline.checkpoint import CheckpointId
from gangline.launch import name_of_this_node
from gangline.tools import read_ending
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_ckpt_zarr.tiers.peers import LINE, SILENT_SECONDS, Address, announce, withdraw
from gangline_ckpt_zarr.tiers.places import SPARE, directory

OWNER = ".keeper"  # in the directory: whose it is
LAST_WORDS = 5.0  # seconds in which ranks end when their launcher was killed; less than a sidecar then has
LOOK_SECONDS = 0.2
TOKEN_SECONDS = 10.0  # that who connects may take to show the token; no more of a stranger than a thread for so long
COPIES = 2  # of one rank's files: as many as its own node has of them


def keep(run_dir: str, waits: float = 0.0) -> None:
    """The sidecar: the directory is there for as long as the job, and `waits` seconds longer where it was killed."""
    place, launcher = directory(run_dir), os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # also of the threads that answer
    mine = secrets.token_hex(8)
    with _alone(place):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        (place / OWNER).write_text(mine)
    server = Server(place)
    address = Address(name_of_this_node(), os.uname().nodename, server.port, server.token)
    announce(run_dir, address)
    signal.sigwait({signal.SIGTERM})
    killed = os.getppid() != launcher
    if killed and waits:
        _wait(place, mine, run_dir, waits)
    withdraw(run_dir, address)
    _remove(place, mine)
    if killed and not waits:  # ranks that die of it may be in the middle of a save
        end = time.monotonic() + LAST_WORDS
        while time.monotonic() < end:
            time.sleep(0.1)
            _remove(place, mine)


def _wait(place: Path, mine: str, run_dir: str, seconds: float) -> None:
    """Until a successor has taken over, the job is over, or nobody has come."""
    before, end = read_ending(run_dir), time.monotonic() + seconds
    while time.monotonic() < end and _owner(place) == mine:
        ending = read_ending(run_dir)
        if ending is not None and ending != before and not ending.requeue:
            return
        if signal.sigtimedwait({signal.SIGTERM}, LOOK_SECONDS) is not None:
            return


def _remove(place: Path, mine: str) -> None:
    """What is ours, or nobody's: a save that was under way may have made it once more."""
    gone = place.with_name(f"{place.name}-{mine}")
    with _alone(place):
        if _owner(place) not in (mine, ""):
            return
        with contextlib.suppress(OSError):
            place.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.parent.rmdir()


def _owner(place: Path) -> str:
    try:
        return (place / OWNER).read_text()
    except OSError:
        return ""


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """One keeper at a time takes a directory of this user over, or removes it."""
    root = place.parent.parent
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class Server(socketserver.ThreadingTCPServer):
    """Answers what `peers.Peer` asks, each in a thread of its own, from its making to the end of the process."""

    daemon_threads = True

    def __init__(self, place: Path) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.socket = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.port, self.token = self.socket.getsockname()[1], secrets.token_hex(16)
        self.place, self.store = place, LocalStore(place)
        threading.Thread(target=self.serve_forever, daemon=True, name="keeper").start()


class _Handler(socketserver.StreamRequestHandler):
    server: Server
    timeout = SILENT_SECONDS

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # who asked is gone, or is nobody of ours
            if not self._knows_token():
                return
            question = json.loads(self.rfile.readline(LINE))
            try:
                self._answer(question)
            except FileNotFoundError:
                self._say(missing=True)
            except OSError as error:
                self._say(why=error.strerror or str(error))

    def _knows_token(self) -> bool:
        """All that is read of a stranger: as many bytes as the token's line has, for a limited time in all."""
        expected, said = self.server.token.encode() + b"\n", b""
        end = time.monotonic() + TOKEN_SECONDS
        while len(said) < len(expected):
            self.connection.settimeout(max(0.001, end - time.monotonic()))
            got = self.connection.recv(len(expected) - len(said))
            if not got or time.monotonic() > end:
                return False
            said += got
        self.connection.settimeout(SILENT_SECONDS)
        return hmac.compare_digest(said, expected)

    def _answer(self, asked: dict[str, Any]) -> None:
        if asked["do"] == "sizes":
            names = [name for name in self.server.store.names() if CheckpointId.parse(name) is not None]
            sizes = {name: self.server.store.sizes(name) for name in names}
            self._say(sizes={f"{name}/{path}": size for name, held in sizes.items() for path, size in held.items()})
        elif asked["do"] == "read":
            self._send(self._path(asked["path"]), asked["ranges"])
        elif asked["do"] == "put":
            self._receive(asked["path"], asked["size"])
            self._say()
        elif asked["do"] == "drop":
            self.server.store.delete(str(self._path(asked["path"]).relative_to(self.server.place)))
            self._say()

    def _path(self, path: str) -> Path:
        """In a checkpoint's directory, wherever `path` says."""
        parts = path.split("/")
        if CheckpointId.parse(parts[0]) is None or not {"", ".", ".."}.isdisjoint(parts) or "\0" in path:
            raise FileNotFoundError(path)
        return self.server.place / path

    def _say(self, **answer: Any) -> None:
        self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _send(self, path: Path, ranges: list[list[int | None]]) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._say(size=size)
            for offset, count in ranges:
                if count != 0:
                    self.connection.sendfile(file, offset or 0, count)

    def _receive(self, path: str, size: int) -> None:
        """Into the memory of this rank's oldest copy, where the newest is another one: fresh pages cost more."""
        target = self._path(path)
        if path.count("/") != 2:
            raise OSError(f"{path} is no file of a rank")
        spare = self.server.place / SPARE / f"copy-{secrets.token_hex(8)}"
        spare.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = sorted(self.server.place.glob(f"step-*/*/{escape(target.name)}"), key=_age)
        for old in held[: 1 - COPIES]:
            with contextlib.suppress(FileNotFoundError):
                os.rename(old, spare)
        try:
            with contextlib.suppress(OSError):
                for old in held[: 1 - COPIES]:
                    old.parent.rmdir()
                    old.parent.parent.rmdir()
            self._fill(spare, size)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.rename(spare, target)
        finally:
            spare.unlink(missing_ok=True)

    def _fill(self, spare: Path, size: int) -> None:
        handle = os.open(spare, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(handle, size)
            if size:
                os.posix_fallocate(handle, 0, size)  # raises where there is no room; touching a page would kill
                with mmap.mmap(handle, size) as memory, memoryview(memory) as into:
                    self._read_all(into)
        finally:
            os.close(handle)

    def _read_all(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            with into[done:] as rest:
                got = self.rfile.readinto(rest)
            if not got:
                raise OSError("it broke off")
            done += got


def _age(path: Path) -> tuple[Any, str]:
    id = CheckpointId.parse(path.parent.parent.name)
    return (id.attempt, id.step) if id is not None else (0, 0), str(path)
