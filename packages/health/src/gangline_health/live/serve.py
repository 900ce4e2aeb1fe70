"""Sidecar that serves the metrics of a run at GET /metrics. Torch-free; needs the extra `metrics`."""

from __future__ import annotations

import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from gangline.health import Action, Verdict
from gangline.run.events import Events
from gangline_health.live.openmetrics import RunCollector


class MetricsServer(ThreadingHTTPServer):
    """HTTP server of the metrics of one run."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, run_dir: Path, host: str, port: int) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(RunCollector(run_dir))
        super().__init__((host, port), MetricsHandler)


class MetricsHandler(BaseHTTPRequestHandler):
    """Handler that answers GET /metrics and / with OpenMetrics text for any `Accept` header, and other paths with 404.

    It replaces the handler of prometheus_client, which answers every path, and copies the version of the `Accept`
    header to its answer.
    """

    server: MetricsServer
    timeout = 10.0

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404, "metrics are at /metrics")
            return
        content = generate_latest(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Skip logging: each request would be logged in a line."""


def main(run_dir: str, host: str, port: int) -> None:
    """Run the metrics sidecar. If it cannot listen on the address, write a verdict and return."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server = MetricsServer(Path(run_dir), host, port)
    except OSError as error:
        evidence = (
            f"metrics cannot be served at {host}:{port}: {error.strerror or error}; the run continues without metrics"
        )
        events = Events(run_dir, by="metrics")
        events.write("verdict", **Verdict("no-metrics", f"{host}:{port}", 1.0, evidence, Action.WARN).to_dict())
        events.close()
        print(evidence, flush=True)
        return
    server.serve_forever()
