"""The writer process: ``python -m gangline_ckpt_zarr.save.writer.process TRAINER_PID``.

There is one for each rank, and one more for durable copies, started by `gangline_ckpt_zarr.save.writer.client`. It has
neither torch nor numpy, so it starts in a tenth of a second and takes little memory; it dies with its trainer, and only
its trainer can stop it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from gangline.launch.guard import die_with
from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.format.spans import parse_spans
from gangline_ckpt_zarr.load.scan import BadChunk, ChunkScanner, read_windows
from gangline_ckpt_zarr.save.writer.checksum_thread import ChecksumThread
from gangline_ckpt_zarr.save.writer.messages import Answer, StagedMemory, parse_memory
from gangline_ckpt_zarr.stores.base import ObjectPath, ObjectStore, ObjectWriter
from gangline_ckpt_zarr.stores.open import DEADLINE_SECONDS, open_store

BLOCK = 8 << 20  # bytes per write: smaller blocks are slower with O_DIRECT, larger blocks are not faster
NICE = 10  # nice value, which gives the trainer priority; costs nothing if a core is free
REPORT_SECONDS = 0.2
SWITCH_SECONDS = 0.0001  # thread switch interval: with Python's default of 5 ms the disk would wait for checksums


class Damaged(Exception):
    """Error of a copy whose source has a bad or unreadable chunk."""

    def __init__(self, bad: BadChunk) -> None:
        self.chunk = bad.run, bad.number
        super().__init__(bad.why)


class WriterProcess:
    """Writer process: runs one job after another, and answers each job."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._stores: dict[tuple[str, float], ObjectStore] = {}
        self._mapped: tuple[object, memoryview] = (None, memoryview(b""))

    def run(self, jobs: queue.Queue[dict[str, Any] | None]) -> None:
        operations = {"write": self._write, "copy": self._copy}
        while (request := jobs.get()) is not None:
            began = time.monotonic()
            try:
                answer = operations[request["op"]](request)
            except Exception as error:
                why, kind = describe_error(error), type(error).__name__
                answer = Answer(request["job"], 0, False, why, kind, _get_errno(error), _chunk(error))
            self._say(Answer(**vars(answer) | {"seconds": time.monotonic() - began}))
        for store in self._stores.values():
            store.close()

    def _write(self, said: dict[str, Any]) -> Answer:
        """Write the sealed memory to the target; without a target, seal the memory and leave it in place."""
        view = self._map(parse_memory(said["staging"]))
        checksums, progress = ChecksumThread(view, parse_spans(said["runs"])), _Progress(said["job"], self._say)
        try:
            if said["target"] is not None:
                self._put(said, view, checksums, progress)
            checksums.wait(len(view))
        finally:
            checksums.stop()
        return Answer(said["job"], progress.bytes, done=True)

    def _copy(self, said: dict[str, Any]) -> Answer:
        """Copy an object and check each chunk on the way. A bad chunk raises Damaged, and no object is left."""
        source, scanner = ObjectPath(*said["source"]), ChunkScanner(parse_spans(said["runs"]))
        progress = _Progress(said["job"], self._say)
        with self._create_objects(said, said["size"]) as writer:
            for window in read_windows(self._store(source.store, said), source.path, said["size"]):
                for bad in scanner.feed(window):
                    raise Damaged(bad)
                if window.content is None:
                    raise Damaged(scanner.find_unread(window))
                writer.write(window.content)
                progress.add(window.size)
        return Answer(said["job"], progress.bytes, done=True)

    @contextlib.contextmanager
    def _create_objects(self, said: dict[str, Any], size: int) -> Iterator[ObjectWriter]:
        """Yield the writer of the target, which is durable after the `with` block, or aborted if the block fails."""
        target = ObjectPath(*said["target"])
        writer = self._store(target.store, said).create(target.path, size)
        try:
            yield writer
            writer.close()
        except BaseException:
            writer.abort()
            raise

    def _put(self, said: dict[str, Any], view: memoryview, checksums: ChecksumThread, progress: _Progress) -> None:
        with self._create_objects(said, len(view)) as writer:
            for start in range(0, len(view), BLOCK):
                block = view[start : start + BLOCK]
                checksums.wait(start + len(block))
                writer.write(block)
                progress.add(len(block))

    def _store(self, url: str, said: dict[str, Any]) -> ObjectStore:
        deadline = said.get("deadline_seconds") or DEADLINE_SECONDS
        if (url, deadline) not in self._stores:
            self._stores[url, deadline] = open_store(url, deadline_seconds=deadline)
        return self._stores[url, deadline]

    def _map(self, place: StagedMemory) -> memoryview:
        """Return the staged bytes. They stay mapped until a job names other memory: first touches of pages are slow."""
        if place.size == 0:
            return memoryview(b"")
        file = place.fd if place.path is None else os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
        assert file is not None
        try:
            status = os.fstat(file)
            if status.st_size < place.size:
                raise ValueError(f"{place} has only {status.st_size} bytes")
            key = (status.st_dev, status.st_ino, status.st_size)
            if self._mapped[0] != key:
                self._mapped = (None, memoryview(b""))
                gc.collect()  # free the old pages first
                # Raises OSError if tmpfs is full. Without it, a later write would kill this process by SIGBUS.
                os.posix_fallocate(file, 0, status.st_size)
                flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                self._mapped = (key, memoryview(mmap.mmap(file, status.st_size, flags)))
        finally:
            if place.path is not None:
                os.close(file)
        return self._mapped[1][: place.size]

    def _say(self, answer: Answer) -> None:
        self._out.write(answer.encode())
        self._out.flush()


class _Progress:
    """Reporter of the number of bytes written, at most once per `REPORT_SECONDS`."""

    def __init__(self, job: int, say: Any) -> None:
        self.bytes = 0
        self._job, self._say, self._next = job, say, time.monotonic() + REPORT_SECONDS

    def add(self, nbytes: int) -> None:
        self.bytes += nbytes
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REPORT_SECONDS
            self._say(Answer(self._job, self.bytes))


def _get_errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _chunk(error: BaseException) -> tuple[int, int] | None:
    return error.chunk if isinstance(error, Damaged) else None


def _listen(lines: BinaryIO, jobs: queue.Queue[dict[str, Any] | None]) -> None:
    """Put requests into the queue at once, so that the trainer never waits for a full pipe."""
    for line in lines:
        request = json.loads(line)
        if request["op"] == "close":
            break
        jobs.put(request)
    jobs.put(None)


def be_nice() -> None:
    """Give the trainer priority over this process.

    The scheduler treats each session as a group and weighs groups against each other (sched(7), autogroup): the nice
    value of a process counts only within its group. So the group gets the nice value too, if this process leads its
    session.
    """
    os.nice(NICE)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
            group.write(str(NICE))


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # only the trainer may stop this process during a save
    die_with(int(sys.argv[1]))
    be_nice()
    sys.setswitchinterval(SWITCH_SECONDS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a library must not mix with answers
    jobs: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, jobs), daemon=True, name="listen").start()
    WriterProcess(answers).run(jobs)


if __name__ == "__main__":
    main()
