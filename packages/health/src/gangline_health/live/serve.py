"""The process that answers who scrapes: GET /metrics. Torch-free."""

from __future__ import annotations

import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gangline.health import Action, Verdict
from gangline.run.events import Events
from gangline_health.live.openmetrics import TYPE, text
from gangline_health.live.status import RunFollower


class MetricsServer(ThreadingHTTPServer):
    """Serves one run. Each question reads what has been written since the last."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, run_dir: Path, host: str, port: int) -> None:
        self.watched, self.lock = RunFollower(run_dir), threading.Lock()
        super().__init__((host, port), MetricsHandler)

    def exposition(self) -> str:
        with self.lock:
            return text(self.watched.look())


class MetricsHandler(BaseHTTPRequestHandler):
    """GET /metrics, and nothing else."""

    server: MetricsServer
    timeout = 10.0

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404, "metrics are at /metrics")
            return
        content = self.server.exposition().encode()
        self.send_response(200)
        self.send_header("Content-Type", TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: every question would be a line."""


def main(run_dir: str, host: str, port: int) -> None:
    """The sidecar's target. An address that is taken is a verdict; the run goes on without."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server = MetricsServer(Path(run_dir), host, port)
    except OSError as error:
        evidence = f"metrics cannot be served at {host}:{port}: {error.strerror or error}; the run goes on without"
        events = Events(run_dir, by="metrics")
        events.write("verdict", **Verdict("no-metrics", f"{host}:{port}", 1.0, evidence, Action.WARN).to_dict())
        events.close()
        print(evidence, flush=True)
        return
    server.serve_forever()
