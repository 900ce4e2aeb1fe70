"""Other nodes' memory: where its keeper answers, and what can be asked of it. Torch-free.

A question is a line with the token and a line of JSON; behind a `put` come the bytes. The answer is a line of JSON;
behind one to a `read` come the bytes. The token, which keeps strangers out, lies in the run directory, where only its
owner reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gangline_ckpt_zarr.stores.base import Ranges

FOLDER = ".memory"  # in the run directory: a file for each node's keeper
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 30.0
PATIENCE_SECONDS = 10.0  # a keeper may be about to start, or to be replaced by its successor's
LINE = 1 << 26  # bytes of a question or of the line of an answer


@dataclass(frozen=True)
class Address:
    """Where a keeper listens. `machine`: its own name, for those on the same one."""

    node: str
    machine: str
    port: int
    token: str

    @property
    def host(self) -> str:
        return "127.0.0.1" if self.machine == os.uname().nodename else self.node.partition("/")[0]


def announce(run_dir: str | Path, address: Address) -> None:
    """Let the other nodes know; an earlier keeper of this node is asked no more."""
    path = _path(run_dir, address.node)
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(address), file)
    os.replace(new, path)


def withdraw(run_dir: str | Path, address: Address) -> None:
    """This keeper answers no more."""
    with contextlib.suppress(OSError):
        if _read(_path(run_dir, address.node)) == address:
            _path(run_dir, address.node).unlink()
            _path(run_dir, address.node).parent.rmdir()


def announced(run_dir: str | Path) -> list[str]:
    """The nodes whose keepers have said that they are there; some may have been killed since."""
    found = (_read(path) for path in Path(run_dir, FOLDER).glob("*.json"))
    return sorted(address.node for address in found if address is not None)


class PeerLost(OSError):
    """What another node's memory held is lost with it: a reason to take an older checkpoint, not to stop."""


class Peer:
    """The keeper of one node, asked by another one. What fails is an OSError that names the node."""

    def __init__(self, run_dir: str | Path, node: str, patience: float = PATIENCE_SECONDS) -> None:
        self.node, self._path, self._patience = node, _path(run_dir, node), patience

    def sizes(self) -> dict[str, int]:
        """Bytes of every file of a checkpoint there, by path."""
        with self._asked({"do": "sizes"}) as (answer, _):
            return answer["sizes"]

    def read(self, path: str) -> bytes:
        """A small file, whole. FileNotFoundError."""
        with self._asked({"do": "read", "path": path, "ranges": [[0, None]]}) as (answer, connection):
            content = bytearray(answer["size"])
            _receive(connection, memoryview(content))
            return bytes(content)

    def read_into(self, path: str, ranges: Ranges) -> None:
        """From each offset on, fill the buffers. FileNotFoundError; EOFError where the file ends early."""
        buffers = [[buffer.cast("B") for buffer in each] for _, each in ranges]
        wanted = [[offset, sum(map(len, each))] for (offset, _), each in zip(ranges, buffers, strict=True)]
        with self._asked({"do": "read", "path": path, "ranges": wanted}) as (_, connection):
            for buffer in (buffer for each in buffers for buffer in each if buffer.nbytes):
                _receive(connection, buffer)

    def put(self, path: str, file: Path) -> None:
        """Have it keep a copy of a file; on return it does."""
        with file.open("rb") as content:
            size = os.fstat(content.fileno()).st_size
            with self._asked({"do": "put", "path": path, "size": size}, content):
                pass

    def drop(self, path: str) -> None:
        """Have it forget a copy."""
        with self._asked({"do": "drop", "path": path}):
            pass

    @contextlib.contextmanager
    def _asked(self, question: dict[str, Any], content: Any = None) -> Iterator[tuple[dict[str, Any], socket.socket]]:
        """The answer, and the connection where the rest of it comes; asked again while nobody answers."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                connection, answer = self._ask(question, content)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLost(f"node {self.node} does not answer: {error}") from error
                time.sleep(0.1)
        with connection:
            if answer.get("missing"):
                raise FileNotFoundError(f"node {self.node} has no {question['path']}")
            if why := answer.get("why"):
                raise PeerLost(f"node {self.node}: {why}")
            try:
                yield answer, connection
            except (ConnectionError, TimeoutError) as error:
                raise PeerLost(f"node {self.node} broke off: {error}") from error

    def _ask(self, question: dict[str, Any], content: Any) -> tuple[socket.socket, dict[str, Any]]:
        address = _read(self._path)
        if address is None:
            raise ConnectionError("its memory has no keeper")
        connection = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
        try:
            connection.settimeout(SILENT_SECONDS)
            connection.sendall(f"{address.token}\n{json.dumps(question)}\n".encode())
            if content is not None:
                content.seek(0)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused early: the answer says why
                    connection.sendfile(content)
            return connection, json.loads(_line(connection))
        except BaseException:
            connection.close()
            raise


def reached(run_dir: str | Path, nodes: Sequence[str]) -> dict[str, dict[str, int]]:
    """What those of `nodes` have that answer at once, all asked side by side."""
    from concurrent.futures import ThreadPoolExecutor

    def ask(node: str) -> dict[str, int]:
        try:
            return Peer(run_dir, node, patience=0.0).sizes()
        except (OSError, ValueError):
            return {}

    with ThreadPoolExecutor(min(64, max(1, len(nodes)))) as pool:
        return dict(zip(nodes, pool.map(ask, nodes), strict=True))


def _path(run_dir: str | Path, node: str) -> Path:
    return Path(run_dir, FOLDER, f"{node.replace('/', '-')}.json")


def _read(path: Path) -> Address | None:
    try:
        return Address(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _line(connection: socket.socket) -> bytes:
    """Byte by byte would be slow, and more than the line may not be taken: what follows is someone else's to read."""
    found = bytearray()
    while not found.endswith(b"\n"):
        seen = connection.recv(1 << 16, socket.MSG_PEEK)
        if not seen or len(found) > LINE:
            raise ConnectionError("it broke off")
        found += connection.recv(seen.find(b"\n") + 1 or len(seen))
    return bytes(found)


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        got = connection.recv_into(into)
        if not got:
            raise EOFError("a node broke off in the middle of a file")
        into = into[got:]
