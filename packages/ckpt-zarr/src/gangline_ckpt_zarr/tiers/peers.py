"""Peers: the keepers of other nodes' memory, their addresses, and the requests to them. Torch-free.

Both ends first prove that they know the keeper's token (`handshake`), which is in the run directory, in a file that
only its owner can read; a file of another user is not trusted. Then the client sends a request, one line of JSON, and
the keeper sends an answer, another line. The bytes follow the answer to a `read`. The first answer to a `put` confirms
that there is space; a second answer confirms that the bytes are stored.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline.storage.files import lock_file, write_whole
from gangline_ckpt_zarr.stores.base import Ranges
from gangline_ckpt_zarr.tiers import handshake
from gangline_ckpt_zarr.tiers.handshake import receive_line

FOLDER = ".memory"  # directory in the run directory, with a file for each node's keeper
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 30.0
PATIENCE_SECONDS = 10.0  # maximum seconds of retries: a keeper may be about to start or to be replaced
LINE = 1 << 26  # maximum bytes of a request line or of an answer line
PIECE = 1 << 23  # bytes sent between two calls of `waiting`


@dataclass(frozen=True)
class Address:
    """Address of a keeper. `machine`: its `identify_machine()`; processes on one machine use loopback."""

    node: str
    machine: str
    port: int
    token: str

    @property
    def host(self) -> str:
        return "127.0.0.1" if self.machine == identify_machine() else self.node.partition("/")[0]


@functools.cache
def identify_machine() -> str:
    """Return an id of this process's loopback interface: several machines may have the same name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return os.uname().nodename


def announce(run_dir: str | Path, address: Address) -> None:
    """Publish a keeper's address to the other nodes; it replaces the address of this node's earlier keeper."""
    path = _locate_address(run_dir, address.node)
    with _lock(path.parent):
        write_whole(path, json.dumps(asdict(address)), mode=0o600, durable=False)


def withdraw(run_dir: str | Path, address: Address) -> None:
    """Delete this keeper's address, unless a successor's address has replaced it."""
    path = _locate_address(run_dir, address.node)
    with contextlib.suppress(OSError, UserError), _lock(path.parent):
        if _read(path) == address:
            path.unlink()


def _lock(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Lock the folder of addresses for one keeper at a time. The folder stays: another keeper may be about to write."""
    folder.mkdir(exist_ok=True)
    return lock_file(folder / "lock", mode=0o600)


def list_announced(run_dir: str | Path) -> list[str]:
    """Return the nodes whose keepers have published an address; some keepers may have been killed since."""
    addresses = (_read(path) for path in Path(run_dir, FOLDER).glob("*.json"))
    return sorted(address.node for address in addresses if address is not None)


class PeerLost(OSError):
    """Failed request to another node's keeper, whose files may be lost: a reason to load an older checkpoint."""


class Peer:
    """Client of another node's keeper. A failure raises an OSError that names the node."""

    def __init__(self, run_dir: str | Path, node: str, patience: float = PATIENCE_SECONDS) -> None:
        self.node, self._path, self._patience = node, _locate_address(run_dir, node), patience

    def list_sizes(self) -> dict[str, int]:
        """Return the size in bytes of every checkpoint file on the node, by path."""
        with self._send_request({"do": "sizes"}) as (answer, _):
            return answer["sizes"]

    def read(self, path: str) -> bytes:
        """Return the content of a small file. Raises FileNotFoundError."""
        with self._send_request({"do": "read", "path": path, "ranges": [[0, None]]}) as (answer, connection):
            content = bytearray(answer["size"])
            _receive(connection, memoryview(content))
            return bytes(content)

    def read_into(self, path: str, ranges: Ranges) -> None:
        """Fill each range's buffers from its offset on. Raises FileNotFoundError, PeerLost, EOFError (short file)."""
        buffers = [[buffer.cast("B") for buffer in each] for _, each in ranges]
        byte_ranges = [[offset, sum(map(len, each))] for (offset, _), each in zip(ranges, buffers, strict=True)]
        with self._send_request({"do": "read", "path": path, "ranges": byte_ranges}) as (answer, connection):
            end = max((offset + count for offset, count in byte_ranges if count), default=0)
            if end > answer["size"]:
                raise EOFError(f"{path} on node {self.node} ends at byte {answer['size']}, before byte {end}")
            for buffer in (buffer for each in buffers for buffer in each if buffer.nbytes):
                _receive(connection, buffer)

    def put(
        self,
        path: str,
        file: Path,
        patience: float | None = None,
        silent: float = SILENT_SECONDS,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy a file to the node; it is stored on the node on return. Raises OSError, PeerLost.

        `patience`: maximum seconds of retries while the node does not answer. `silent`: time-out, in seconds, of each
        send or receive. `waiting`: called repeatedly while bytes are sent.
        """
        with file.open("rb") as content:
            size = os.fstat(content.fileno()).st_size
            with self._send_request({"do": "put", "path": path, "size": size}, patience, silent) as (_, connection):
                for start in range(0, size, PIECE):
                    connection.sendfile(content, start, min(PIECE, size - start))
                    waiting()
                if why := _answer(connection, silent).get("why"):
                    raise PeerLost(f"node {self.node}: {why}")

    def drop(self, path: str, silent: float = SILENT_SECONDS) -> None:
        """Ask the node to delete a copy, without retries."""
        with self._send_request({"do": "drop", "path": path}, 0.0, silent):
            pass

    @contextlib.contextmanager
    def _send_request(
        self, question: dict[str, Any], patience: float | None = None, silent: float = SILENT_SECONDS
    ) -> Iterator[tuple[dict[str, Any], socket.socket]]:
        """Yield (answer, connection for bytes that follow). Retries for `patience` s while the node does not answer."""
        deadline = time.monotonic() + (self._patience if patience is None else patience)
        while True:
            try:
                connection, answer = self._ask(question, silent)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise PeerLost(f"request to node {self.node} failed: {error}") from error
                time.sleep(0.1)
        with connection:
            if answer.get("missing"):
                raise FileNotFoundError(f"{question['path']} is missing on node {self.node}")
            if why := answer.get("why"):
                raise PeerLost(f"node {self.node}: {why}")
            try:
                yield answer, connection
            except (ConnectionError, TimeoutError) as error:
                raise PeerLost(f"connection to node {self.node} lost: {error}") from error

    def _ask(self, question: dict[str, Any], silent: float) -> tuple[socket.socket, dict[str, Any]]:
        address = _read(self._path)
        if address is None or address.node != self.node:
            raise ConnectionError("the address of its keeper is missing or invalid")
        connection = socket.create_connection((address.host, address.port), min(CONNECT_SECONDS, silent))
        try:
            handshake.ask(connection, address.token, silent)
            connection.settimeout(silent)
            connection.sendall(json.dumps(question).encode() + b"\n")
            return connection, _answer(connection, silent)
        except BaseException:
            connection.close()
            raise


def ask_peers(run_dir: str | Path, nodes: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return, by node, its files (path -> bytes), {} if the node does not answer at once. Requests are parallel."""
    from concurrent.futures import ThreadPoolExecutor

    def ask(node: str) -> dict[str, int]:
        try:
            return Peer(run_dir, node, patience=0.0).list_sizes()
        except (OSError, ValueError):
            return {}

    with ThreadPoolExecutor(min(64, max(1, len(nodes)))) as pool:
        return dict(zip(nodes, pool.map(ask, nodes), strict=True))


def _locate_address(run_dir: str | Path, node: str) -> Path:
    return Path(run_dir, FOLDER, f"{node.replace('/', '-')}.json")


def _read(path: Path) -> Address | None:
    """Return the address in a file; None if it is invalid or not from a keeper of this user."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            address = Address(**json.loads(file.read()))
    except (OSError, ValueError, TypeError):
        return None
    kinds = (isinstance(text, str) for text in (address.node, address.machine, address.token))
    sound = all(kinds) and type(address.port) is int and 0 < address.port < 1 << 16 and address.token
    return address if sound and (owner == os.getuid() or owner == _find_own_uid(path.parent)) else None


@functools.cache
def _find_own_uid(folder: Path) -> int | None:
    """Return the owner id of files that this process creates in `folder`: a file server may map root to another id."""
    probe = folder / f"whose.{secrets.token_hex(8)}"
    try:
        with open(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _answer(connection: socket.socket, silent: float) -> dict[str, Any]:
    try:
        answer = json.loads(receive_line(connection, LINE, silent))
    except ValueError as error:
        raise ConnectionError("its answer is not valid JSON") from error
    if not isinstance(answer, dict):
        raise ConnectionError("its answer is not a JSON object")
    connection.settimeout(silent)
    return answer


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        got = connection.recv_into(into)
        if not got:
            raise ConnectionError("closed in the middle of a file")
        into = into[got:]
