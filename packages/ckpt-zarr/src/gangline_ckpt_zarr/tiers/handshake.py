"""Handshake: both ends of a connection prove that they know a keeper's token, without sending it. Torch-free.

The peer (client) sends a random number. The keeper answers with its own random number and an HMAC of both numbers, and
the peer answers with another HMAC of both. So a process that listens on the port of an ended keeper is not trusted,
does not learn the token and receives no weights.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import socket
import time

NUMBER = 32  # characters of a random number, in hex
PROOF = 64
_NUMBER = re.compile(rb"[0-9a-f]{%d}" % NUMBER)


def ask(connection: socket.socket, token: str, seconds: float) -> None:
    """Run the peer's side. Raises OSError, ConnectionError if the other end is not the keeper with this token."""
    nonce = secrets.token_hex(NUMBER // 2).encode()
    connection.sendall(nonce + b"\n")
    theirs, _, proof = receive_line(connection, NUMBER + PROOF + 2, seconds).partition(b" ")
    if not hmac.compare_digest(proof, _compute_proof(token, b"keeper", nonce, theirs)):
        raise ConnectionError("another process listens on the keeper's port")
    connection.sendall(_compute_proof(token, b"peer", nonce, theirs) + b"\n")


def admit(connection: socket.socket, token: str, seconds: float) -> bool:
    """Run the keeper's side; return whether the peer proves in time that it knows the token. Raises OSError."""
    until = time.monotonic() + seconds
    theirs = receive_line(connection, NUMBER + 1, seconds)
    if not _NUMBER.fullmatch(theirs):
        return False
    nonce = secrets.token_hex(NUMBER // 2).encode()
    connection.sendall(nonce + b" " + _compute_proof(token, b"keeper", theirs, nonce) + b"\n")
    proof = receive_line(connection, PROOF + 1, until - time.monotonic())
    return hmac.compare_digest(proof, _compute_proof(token, b"peer", theirs, nonce))


def receive_line(connection: socket.socket, most: int, seconds: float) -> bytes:
    """Return a line without its newline; it may have `most` bytes with the newline. Raises OSError after `seconds`.

    Reading byte by byte would be slow, and bytes after the line must stay for the next reader.
    """
    line, until = bytearray(), time.monotonic() + seconds
    while not line.endswith(b"\n"):
        timeout = until - time.monotonic()
        if timeout <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(timeout)
        preview = connection.recv(min(1 << 16, most - len(line)), socket.MSG_PEEK)
        if not preview:
            raise ConnectionError("the connection was closed")  # or the line is longer than `most`
        line += connection.recv(preview.find(b"\n") + 1 or len(preview))
    return bytes(line[:-1])


def _compute_proof(token: str, who: bytes, asker: bytes, keeper: bytes) -> bytes:
    return hmac.new(token.encode(), b" ".join((who, asker, keeper)), hashlib.sha256).hexdigest().encode()
