"""Both ends of a connection show that they know a keeper's token, and neither says it. Torch-free.

Who asks sends a number that nobody can guess, the keeper answers with one of its own and a proof of both, and gets a
proof back. So what listens at a port that a keeper has left is not believed, learns no token and is sent no weights.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import socket
import time

NUMBER = 32  # characters
PROOF = 64
_NUMBER = re.compile(rb"[0-9a-f]{%d}" % NUMBER)


def ask(connection: socket.socket, token: str, seconds: float) -> None:
    """Of who asks. Raises OSError, ConnectionError where who answers is not the keeper that has this token."""
    nonce = secrets.token_hex(NUMBER // 2).encode()
    connection.sendall(nonce + b"\n")
    theirs, _, proof = receive_line(connection, NUMBER + PROOF + 2, seconds).partition(b" ")
    if not hmac.compare_digest(proof, _compute_proof(token, b"keeper", nonce, theirs)):
        raise ConnectionError("what answers there is another process")
    connection.sendall(_compute_proof(token, b"peer", nonce, theirs) + b"\n")


def admit(connection: socket.socket, token: str, seconds: float) -> bool:
    """Of the keeper: whether who asks knows the token, and says so soon. Raises OSError."""
    until = time.monotonic() + seconds
    theirs = receive_line(connection, NUMBER + 1, seconds)
    if not _NUMBER.fullmatch(theirs):
        return False
    nonce = secrets.token_hex(NUMBER // 2).encode()
    connection.sendall(nonce + b" " + _compute_proof(token, b"keeper", theirs, nonce) + b"\n")
    proof = receive_line(connection, PROOF + 1, until - time.monotonic())
    return hmac.compare_digest(proof, _compute_proof(token, b"peer", theirs, nonce))


def receive_line(connection: socket.socket, most: int, seconds: float) -> bytes:
    """A line, without its end, of at most so many bytes that are there in so many seconds. Raises OSError.

    Byte by byte would be slow, and more than the line may not be taken: what follows is someone else's to read.
    """
    line, until = bytearray(), time.monotonic() + seconds
    while not line.endswith(b"\n"):
        timeout = until - time.monotonic()
        if timeout <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(timeout)
        preview = connection.recv(min(1 << 16, most - len(line)), socket.MSG_PEEK)
        if not preview:
            raise ConnectionError("it broke off")  # or the line is longer
        line += connection.recv(preview.find(b"\n") + 1 or len(preview))
    return bytes(line[:-1])


def _compute_proof(token: str, who: bytes, asker: bytes, keeper: bytes) -> bytes:
    return hmac.new(token.encode(), b" ".join((who, asker, keeper)), hashlib.sha256).hexdigest().encode()
