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
    mine = secrets.token_hex(NUMBER // 2).encode()
    connection.sendall(mine + b"\n")
    theirs, _, proof = line_from(connection, NUMBER + PROOF + 2, seconds).partition(b" ")
    if not hmac.compare_digest(proof, _proof(token, b"keeper", mine, theirs)):
        raise ConnectionError("what answers there is another process")
    connection.sendall(_proof(token, b"peer", mine, theirs) + b"\n")


def admit(connection: socket.socket, token: str, seconds: float) -> bool:
    """Of the keeper: whether who asks knows the token, and says so soon. Raises OSError."""
    until = time.monotonic() + seconds
    theirs = line_from(connection, NUMBER + 1, seconds)
    if not _NUMBER.fullmatch(theirs):
        return False
    mine = secrets.token_hex(NUMBER // 2).encode()
    connection.sendall(mine + b" " + _proof(token, b"keeper", theirs, mine) + b"\n")
    said = line_from(connection, PROOF + 1, until - time.monotonic())
    return hmac.compare_digest(said, _proof(token, b"peer", theirs, mine))


def line_from(connection: socket.socket, most: int, seconds: float) -> bytes:
    """A line, without its end, of at most so many bytes that are there in so many seconds. Raises OSError.

    Byte by byte would be slow, and more than the line may not be taken: what follows is someone else's to read.
    """
    found, until = bytearray(), time.monotonic() + seconds
    while not found.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        seen = connection.recv(min(1 << 16, most - len(found)), socket.MSG_PEEK)
        if not seen:
            raise ConnectionError("it broke off")  # or the line is longer
        found += connection.recv(seen.find(b"\n") + 1 or len(seen))
    return bytes(found[:-1])


def _proof(token: str, who: bytes, asker: bytes, keeper: bytes) -> bytes:
    return hmac.new(token.encode(), b" ".join((who, asker, keeper)), hashlib.sha256).hexdigest().encode()
