"""Measure tokens per second from a store behind HTTP with 25 ms latency: shards fetched in ranges of 8 MiB in parallel.

    python benchmarks/data_remote.py [--shards 4 --latency 0.025]

The server is a separate process that waits before each answer. Shards are announced as a reader announces them,
fetched, verified by checksum, and mapped; then every token is read once. Goal: 100 M tokens per second and node.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from gangline_dataloader.store.manifest import Manifest, Shards, Tokenizer
from gangline_dataloader.store.remote.cache import FileCache
from gangline_dataloader.store.remote.tokens import RemoteTokens
from gangline_dataloader.store.write import SHARD_TOKENS, ShardWriter


def serve(root: Path, latency: float, told: Connection) -> None:
    """Serve files with range requests, each answer `latency` seconds late. Sends the port through `told`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            time.sleep(latency)
            path, asked = root / self.path.lstrip("/"), self.headers.get("Range")
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
            with path.open("rb") as file:
                file.seek(int(first))
                content = file.read(int(last) + 1 - int(first) if last else -1)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.send(server.server_port)
    server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--latency", type=float, default=0.025, help="delay of each answer in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, cache, shards = Path(folder, "store"), Path(folder, "cache"), Shards()
        root.mkdir()
        content = np.random.default_rng(0).integers(0, 50_000, SHARD_TOKENS, dtype=np.uint16)
        for number in range(options.shards):
            writer = ShardWriter(root, number, "<u2")
            writer.write(np.split(content + np.uint16(number), 64))
            shards.append(writer.close())
        Manifest("<u2", 1 << 16, Tokenizer("bytes", "bytes"), shards).write(root)
        mine, its = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(root, options.latency, its))
        server.start()
        try:
            begun = time.perf_counter()
            store = RemoteTokens(f"http://127.0.0.1:{mine.recv()}", FileCache(cache, 1 << 40), 600.0)
            opened, used = time.perf_counter(), time.process_time()
            store.announce(np.arange(options.shards) * SHARD_TOKENS)  # a reader announces shards before it needs them
            for number in range(options.shards):
                store.shard(number)
            fetched, used = time.perf_counter() - opened, time.process_time() - used
            total = sum(int(store.shard(number).sum(dtype=np.int64) > 0) for number in range(options.shards))
        finally:
            server.terminate()
        rate = store.total / fetched / 1e6
        print(f"opened in {1e3 * (opened - begun):.0f} ms (including the start of the server), {total} shards")
        print(f"{rate:.0f} M tokens/s at {1e3 * options.latency:g} ms latency, including checksums")
        print(f"{store.total / used / 1e6:.0f} M tokens per CPU second of the reading process")


if __name__ == "__main__":
    main()
