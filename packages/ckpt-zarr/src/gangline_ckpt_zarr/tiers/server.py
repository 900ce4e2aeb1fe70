"""Server of a keeper for other nodes (`peers.Peer`): sends its files and stores copies of their files. Torch-free.

A connection must first prove, within `TOKEN_SECONDS`, that it knows the token; else it gets no answer, and its thread
ends. If many connections are unproven, a new connection replaces the oldest, so that none can block another node.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import secrets
import socket
import socketserver
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_ckpt_zarr.tiers.handshake import admit, receive_line
from gangline_ckpt_zarr.tiers.peers import LINE, SILENT_SECONDS
from gangline_ckpt_zarr.tiers.places import SPARE

COPIES = 2  # maximum number of copies of a rank's file: as many as the rank's own node has buffers
UNPROVEN = 256  # maximum concurrent connections that have not proven the token
UNPROVEN_OF_ADDRESS = 64  # maximum unproven connections from one address
TOKEN_SECONDS = 5.0  # time-out of the proof, in seconds

_FILE = re.compile(r"data-\w+/\d+\.bin", re.ASCII)


class Server(socketserver.ThreadingTCPServer):
    """Server that answers each request in a thread, from its construction to the end of the process.

    host: the address to listen on; "": all interfaces.
    """

    daemon_threads = True

    def __init__(self, place: Path, host: str = "") -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.socket = socket.create_server((host, 0), family=family, dualstack_ipv6=both)
        self.port, self.token = self.socket.getsockname()[1], secrets.token_hex(16)
        self.place, self.store = place, LocalStore(place)
        self._unproven: dict[socket.socket, str] = {}  # connection -> address, oldest first
        self._changes = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True, name="keeper").start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._make_room(request, client_address[0])
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.forget_unproven(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.forget_unproven(request)

    def forget_unproven(self, request: socket.socket) -> None:
        """Forget a connection that has proven the token or has ended."""
        with self._changes:
            self._unproven.pop(request, None)

    def _make_room(self, request: socket.socket, address: str) -> None:
        """Add an unproven connection. If its address is at its limit, close the oldest connection of this address.

        At the limit of all connections, close the oldest connection of the address with most connections.
        """
        with self._changes:
            counts = Counter(self._unproven.values())
            crowded = address if counts[address] >= UNPROVEN_OF_ADDRESS else None
            if crowded is None and counts.total() >= UNPROVEN:
                ((crowded, _),) = counts.most_common(1)
            if crowded is not None:
                oldest = next(one for one, of in self._unproven.items() if of == crowded)
                del self._unproven[oldest]
                with contextlib.suppress(OSError):  # it has just ended
                    oldest.shutdown(socket.SHUT_RDWR)
            self._unproven[request] = address


class _Handler(socketserver.BaseRequestHandler):
    server: Server
    request: socket.socket

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # peer gone, or its request invalid
            if not admit(self.request, self.server.token, TOKEN_SECONDS):
                return
            self.server.forget_unproven(self.request)
            question = json.loads(receive_line(self.request, LINE, SILENT_SECONDS))
            self.request.settimeout(SILENT_SECONDS)
            try:
                self._answer(question)
            except FileNotFoundError:
                self._say(missing=True)
            except OSError as error:
                self._say(why=error.strerror or str(error))

    def _answer(self, asked: dict[str, Any]) -> None:
        if asked["do"] == "sizes":
            names = [name for name in self.server.store.names() if CheckpointId.parse(name) is not None]
            sizes = {name: self.server.store.list_sizes(name) for name in names}
            self._say(sizes={f"{name}/{path}": size for name, files in sizes.items() for path, size in files.items()})
        elif asked["do"] == "read":
            self._send(self._locate_file(asked["path"]), asked["ranges"])
        elif asked["do"] == "put":
            self._receive(self._locate_file(asked["path"], kept=True), asked["size"])
            self._say()
        elif asked["do"] == "drop":
            path = self._locate_file(asked["path"], kept=True)
            self.server.store.delete(str(path.relative_to(self.server.place)))
            self._say()

    def _locate_file(self, path: str, kept: bool = False) -> Path:
        """Return the path of a checkpoint's file, never a glob; `kept`: only a data file, which peers may replace."""
        if not isinstance(path, str):
            raise TypeError(f"{path} is not a path")
        name, _, file = path.partition("/")
        if kept and not _FILE.fullmatch(file):
            raise OSError(f"{path} is not a data file of a rank")
        if CheckpointId.parse(name) is None or not (_FILE.fullmatch(file) or file == NAME):
            raise FileNotFoundError(path)
        return self.server.place / name / file

    def _say(self, **answer: Any) -> None:
        self.request.sendall(json.dumps(answer).encode() + b"\n")

    def _send(self, path: Path, ranges: list[list[int | None]]) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._say(size=size)
            for offset, count in ranges:
                if count != 0:
                    self.request.sendfile(file, offset or 0, count)

    def _receive(self, target: Path, size: int) -> None:
        """Receive a file: answer "go" once there is space, then read the bytes."""
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"{size} is not a number of bytes")
        spare = self.server.place / SPARE / f"copy-{secrets.token_hex(8)}"
        spare.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = self._create_spare(target, spare, size)
        try:
            self._say(go=True)
            if size:
                with mmap.mmap(handle, size) as memory, memoryview(memory) as into:
                    self._read_all(into)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.rename(spare, target)
        finally:
            os.close(handle)
            spare.unlink(missing_ok=True)

    def _create_spare(self, target: Path, spare: Path, size: int) -> int:
        """Create a file of `size` bytes and return its descriptor. Raises OSError if there is no space.

        It reuses the memory of the oldest copy of the rank's file, because fresh pages cost more. The newest copy
        always stays; the oldest copy stays if there is no space.
        """
        copies = sorted(self.server.place.glob(f"step-*/*/{target.name}"), key=_get_age)
        for surplus in copies[:-COPIES]:
            surplus.unlink(missing_ok=True)
            _remove_empty(surplus)
        old = copies[-COPIES] if len(copies) >= COPIES else None
        if old is not None:
            try:
                os.rename(old, spare)
            except FileNotFoundError:
                old = None
        handle = os.open(spare, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        before = os.fstat(handle).st_size
        try:
            _allocate(handle, size)
        except OSError:
            os.ftruncate(handle, before)
            os.close(handle)
            if old is not None:
                os.rename(spare, old)
            else:
                spare.unlink()
            raise
        os.ftruncate(handle, size)
        if old is not None:
            _remove_empty(old)
        return handle

    def _read_all(self, into: memoryview) -> None:
        offset = 0
        while offset < len(into):
            with into[offset:] as rest:
                got = self.request.recv_into(rest)
            if not got:
                raise OSError("the connection was closed")
            offset += got


def _allocate(handle: int, size: int) -> None:
    """Allocate `size` bytes. Raises OSError if there is no space: touching a missing page would kill the process."""
    there, system = os.fstat(handle), os.fstatvfs(handle)
    if system.f_blocks and size > there.st_blocks * 512 + system.f_bavail * system.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if size:
        os.posix_fallocate(handle, 0, size)


def _remove_empty(path: Path) -> None:
    """Remove the directories of a deleted file if they are now empty."""
    with contextlib.suppress(OSError):
        path.parent.rmdir()
        path.parent.parent.rmdir()


def _get_age(path: Path) -> tuple[Any, str]:
    id = CheckpointId.parse(path.parent.parent.name)
    return (id.attempt, id.step) if id is not None else (0, 0), str(path)
