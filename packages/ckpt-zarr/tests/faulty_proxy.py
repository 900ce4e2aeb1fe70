"""HTTP proxy between store and server that fails on request: 5xx, silence, lost connections, lost answers."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Asked:
    """A request that the proxy received; `number` counts from 0."""

    number: int
    method: str
    path: str
    headers: dict[str, str]


# The fault of a request: None (forward it), an HTTP status (answer at once), "hang" (no answer), "reset" (half of the
# answer, then a connection reset), "lose" (the server executes the request, and the client gets no answer), or an event
# (forward the request once the event is set).
Fault = Callable[[Asked], "int | str | threading.Event | None"]


class FaultyProxy:
    """HTTP proxy to 127.0.0.1:port for ``with FaultyProxy(port) as proxy``; `proxy.fault` chooses the faults."""

    def __init__(self, port: int) -> None:
        self.fault: Fault = lambda asked: None
        self.seen: list[Asked] = []
        self._port, self._lock, self._over = port, threading.Lock(), threading.Event()
        # Moto checks for an object and then writes it; S3 does both in one step.
        self._commits = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        """Remove the fault, and clear the list of requests."""
        self.fault, self.seen = lambda asked: None, []

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        with self._lock:
            asked = Asked(len(self.seen), handler.command, handler.path, dict(handler.headers))
            self.seen.append(asked)
            fault = self.fault(asked)
        if isinstance(fault, int):
            return _answer(handler, fault, {}, b"<Error><Code>InternalError</Code></Error>")
        if isinstance(fault, threading.Event):
            fault.wait()
        if fault == "hang":
            self._over.wait()
            return _break(handler)
        with self._commits if "If-None-Match" in asked.headers else nullcontext():
            server = http.client.HTTPConnection("127.0.0.1", self._port)
            server.request(handler.command, handler.path, body, dict(handler.headers))
            answer = server.getresponse()
            content = answer.read()
            server.close()
        if fault == "lose":
            return _break(handler)
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in ("connection", "date")}
        if fault == "reset":
            _answer(handler, answer.status, headers, content[: len(content) // 2], len(content))
            return _break(handler)
        return _answer(handler, answer.status, headers, content)


def _answer(
    handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, length: int | None = None
) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        if name.lower() not in ("content-length", "transfer-encoding", "server"):
            handler.send_header(name, value)
    told = next((value for name, value in headers.items() if name.lower() == "content-length"), str(len(content)))
    handler.send_header("Content-Length", told if handler.command == "HEAD" else str(length or len(content)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)
        handler.wfile.flush()


def _break(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection with a TCP reset instead of an orderly shutdown."""
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
