"""Writer process: bytes, checksums, durability, exit and restart, as used by the trainer."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given, settings, strategies as st

from gangline.launch.guard import is_alive, wait_for_end
from gangline_ckpt_zarr.format.spans import ChunkSpan, parse_spans
from gangline_ckpt_zarr.save.writer import checksum_thread
from gangline_ckpt_zarr.save.writer.checksum_thread import ChecksumThread
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.save.writer.messages import Answer, StagedMemory
from gangline_ckpt_zarr.save.writer.process import NICE

PAGE = 4096
SECONDS = 60.0  # maximum wait; a longer wait fails the test


class Staging:
    """Shared memory as the trainer allocates it."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("staging")
        os.ftruncate(self.fd, size)
        self.bytes = mmap.mmap(self.fd, size)
        self.bytes[:] = random.Random(size).randbytes(size)
        self.memory = StagedMemory(size, self.fd)


@pytest.fixture
def staging() -> Iterator[Staging]:
    found = Staging(16 * PAGE)
    yield found
    os.close(found.fd)


@pytest.fixture
def writer(staging: Staging) -> Iterator[WriterClient]:
    found = WriterClient([staging.fd])
    yield found
    found.kill()


def empty(writer: WriterClient, store: str | Path, path: str) -> int:
    """Submit a write of an empty object, and return its job number."""
    return writer.write(StagedMemory(0), [], (str(store), path))


def expected(content: bytes, runs: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Return the content with the checksums filled in by another library."""
    filled = bytearray(content)
    for base, stride, nbytes, number in runs:
        for start in range(base, base + number * stride, stride):
            end = start + nbytes
            filled[end : end + 4] = struct.pack("<I", google_crc32c.value(bytes(filled[start:end])))
    return bytes(filled)


def test_write_fills_checksums_and_writes_target(tmp_path: Path, staging: Staging, writer: WriterClient) -> None:
    runs = [(0, PAGE, 1000, 3), (3 * PAGE, 2 * PAGE, PAGE + 1, 2), (8 * PAGE, 1, 3, 1), (9 * PAGE, 12, 8, 500)]
    wanted = expected(staging.bytes[:], runs)
    for store, path in ((str(tmp_path / "one"), "step/0.bin"), (f"file://{tmp_path}/two", "0.bin")):
        answer = writer.wait(writer.write(staging.memory, runs, (store, path)), SECONDS)
        assert answer.done
        assert answer.progress == len(wanted)
        assert (Path(store.removeprefix("file://")) / path).read_bytes() == wanted
    assert staging.bytes[:] == wanted


def test_write_without_target_fills_checksums_in_memory(staging: Staging, writer: WriterClient) -> None:
    """Write as the memory tier does, which keeps the bytes in memory without a file."""
    runs = [(0, PAGE, 1000, 3), (9 * PAGE, 12, 8, 500)]
    wanted = expected(staging.bytes[:], runs)
    answer = writer.wait(writer.write(staging.memory, runs, None), SECONDS)
    assert (answer.done, answer.progress) == (True, 0)
    assert staging.bytes[:] == wanted


def test_writer_maps_staging_by_path_and_remaps_growth(tmp_path: Path, staging: Staging, writer: WriterClient) -> None:
    place = tmp_path / "staging"
    place.write_bytes(bytes(PAGE))
    job = writer.write(StagedMemory(PAGE, path=str(place)), [(0, 1, 16, 1)], (str(tmp_path), "a"))
    assert writer.wait(job, SECONDS).done
    assert (tmp_path / "a").read_bytes() == place.read_bytes() == expected(bytes(PAGE), [(0, 1, 16, 1)])
    writer.wait(writer.write(staging.memory, [], (str(tmp_path), "b")), SECONDS)
    os.ftruncate(staging.fd, 20 * PAGE)
    job = writer.write(StagedMemory(20 * PAGE, staging.fd), [], (str(tmp_path), "c"))
    assert writer.wait(job, SECONDS).done
    assert (tmp_path / "c").read_bytes() == staging.bytes[:] + bytes(4 * PAGE)
    assert (tmp_path / "b").read_bytes() == staging.bytes[:]


def test_write_beyond_staged_memory_fails(tmp_path: Path, staging: Staging, writer: WriterClient) -> None:
    too_large = writer.write(StagedMemory(17 * PAGE, staging.fd), [], (str(tmp_path), "a"))
    assert "has only" in str(writer.wait(too_large, SECONDS).failed)
    beyond = writer.write(staging.memory, [(16 * PAGE - 8, 1, 8, 1)], (str(tmp_path), "a"))
    assert "the memory at byte" in str(writer.wait(beyond, SECONDS).failed)
    assert os.listdir(tmp_path) == []


def test_full_disk_error_names_file_and_reason(tmp_path: Path, staging: Staging, writer: WriterClient) -> None:
    # Maps the memory before the limit, which would apply to memory too.
    assert writer.wait(writer.write(staging.memory, [], None), SECONDS).done
    assert writer.pid is not None
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (15 * PAGE, 15 * PAGE))
    answer = writer.wait(writer.write(staging.memory, [], (str(tmp_path), "step/a")), SECONDS)
    assert answer.failed == f"File too large ({tmp_path}/step/a)"
    assert (answer.kind, answer.errno) == ("OSError", errno.EFBIG)
    assert os.listdir(tmp_path / "step") == []
    assert writer.wait(empty(writer, tmp_path, "a"), SECONDS).done  # the writer continues


def test_answers_arrive_in_job_order(tmp_path: Path, staging: Staging, writer: WriterClient) -> None:
    jobs = [writer.write(staging.memory, [], (str(tmp_path), f"{number}")) for number in range(3)]
    found: list[Answer] = []
    deadline = time.monotonic() + SECONDS
    while sum(answer.over for answer in found) < 3:
        found += writer.poll()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert [answer.job for answer in found if answer.done] == jobs
    assert writer.poll() == []
    with pytest.raises(KeyError):
        writer.wait(jobs[0], SECONDS)


def test_wait_for_stopped_writer_raises_timeout_error(tmp_path: Path, writer: WriterClient) -> None:
    writer.start()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        writer.wait(empty(writer, tmp_path, "a"), 0.05)


@pytest.fixture
def silent_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the environment to an S3 server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        yield


def test_busy_writer_does_not_block_trainer(tmp_path: Path, silent_s3: None, writer: WriterClient) -> None:
    busy = empty(writer, "s3://bucket/runs", "a")
    runs = [(0, 1, 8, 0)] * (1 << 19)  # larger than a pipe buffer
    sends = threading.Thread(target=writer.write, args=(StagedMemory(0), runs, (str(tmp_path), "a")), daemon=True)
    sends.start()
    sends.join(SECONDS)
    assert not sends.is_alive()
    assert writer.poll() == []
    writer.kill()
    assert writer.wait(busy, SECONDS).kind == "WriterDied"


def test_dead_writer_fails_jobs_and_is_restarted(tmp_path: Path, staging: Staging, writer: WriterClient) -> None:
    writer.start()
    first = writer.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    jobs = [empty(writer, tmp_path, f"{number}") for number in range(2)]
    os.kill(first, signal.SIGKILL)
    for job in jobs:
        answer = writer.wait(job, SECONDS)
        assert answer.kind == "WriterDied"
        assert answer.failed == "the writer process was killed by SIGKILL"
    assert not writer.running
    assert writer.wait(empty(writer, tmp_path, "2"), SECONDS).done
    assert writer.pid != first
    assert os.listdir(tmp_path) == ["2"]


def test_writer_error_output_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    babbler = tmp_path / "python"
    babbler.write_text(
        "#!/bin/sh\nread line\ni=0; while [ $i -lt 3000 ]; do echo word $i >&2; i=$((i+1)); done\nexit 3\n"
    )
    babbler.chmod(0o755)
    monkeypatch.setattr("gangline_ckpt_zarr.save.writer.client.sys.executable", str(babbler))
    writer = WriterClient()
    failed = writer.wait(empty(writer, tmp_path, "a"), SECONDS).failed
    writer.close()
    assert failed is not None
    assert failed.startswith("the writer process ended with exit code 3\n")
    assert failed.endswith("word 2999")
    assert len(failed) < 1000


def test_writer_ignores_signals_until_trainer_closes(tmp_path: Path, writer: WriterClient) -> None:
    assert writer.wait(empty(writer, tmp_path, "a"), SECONDS).done
    assert writer.pid is not None
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(writer.pid, signum)
    assert writer.wait(empty(writer, tmp_path, "b"), SECONDS).done
    pid = writer.pid
    last = empty(writer, tmp_path, "c")
    writer.close()
    assert writer.wait(last, SECONDS).done
    assert not is_alive(pid)


TRAINER = """
import sys, time
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.save.writer.messages import StagedMemory
writer = WriterClient()
writer.write(StagedMemory(0), [], ("s3://bucket/runs", "a"))
print(writer.pid, flush=True)
time.sleep(600)
"""


def test_busy_writer_exits_with_killed_trainer(silent_s3: None) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert wait_for_end(pid, SECONDS)


def test_writer_has_lower_priority_than_trainer(tmp_path: Path, writer: WriterClient) -> None:
    """Check the nice value of the process and, if the kernel weighs sessions as groups, of its session."""
    writer.wait(empty(writer, tmp_path, "a"))
    assert writer.pid is not None
    nicest = 19  # the maximum, if the tests themselves run with a nice value
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, writer.pid) == min(own + NICE, nicest)
    group = Path(f"/proc/{writer.pid}/autogroup")
    said = group.read_text().split()[-1] if group.exists() else str(NICE)
    assert said == str(NICE)


def test_writer_nice_keeps_autogroup_of_shared_session() -> None:
    own = Path("/proc/self/autogroup")
    before = own.read_text() if own.exists() else ""
    subprocess.run(
        [sys.executable, "-c", "from gangline_ckpt_zarr.save.writer.process import be_nice; be_nice()"], check=True
    )
    assert (own.read_text() if own.exists() else "") == before


def test_writer_does_not_import_heavy_modules(tmp_path: Path) -> None:
    said = json.dumps({"job": 1, "op": "write", "staging": {"size": 0}, "runs": [], "target": [str(tmp_path), "a"]})
    code = (
        "import sys\nsys.argv[1:] = ['0']\n"
        "from gangline_ckpt_zarr.save.writer.process import main\nmain()\n"
        "print([name for name in ('torch', 'numpy', 'hydra', 'omegaconf', 'fsspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], input=said.encode() + b"\n", capture_output=True, check=True)
    assert Answer.parse(done.stdout).done  # the writer redirects print to stderr
    assert done.stderr == b"[]\n"


KILLS = 6


@pytest.mark.parametrize("trial", range(KILLS))
def test_answered_write_is_complete_after_kill(trial: int, tmp_path: Path, writer: WriterClient) -> None:
    staging = Staging(64 * PAGE)
    place = StagedMemory(64 * PAGE, path=f"/proc/{os.getpid()}/fd/{staging.fd}")
    writer.wait(writer.write(place, [], None), SECONDS)
    runs = [(0, 512, 500, 64 * PAGE // 512)]
    wanted = expected(staging.bytes[:], runs)
    jobs = [writer.write(place, runs, (str(tmp_path), f"step/{number}.bin")) for number in range(3)]
    time.sleep(0.02 * trial / KILLS)
    writer.kill()
    answers = [writer.wait(job, SECONDS) for job in jobs]
    assert [answer.done for answer in answers] == sorted((answer.done for answer in answers), reverse=True)
    for number, answer in enumerate(answers):
        assert answer.done or answer.kind == "WriterDied"
        assert not answer.done or (tmp_path / f"step/{number}.bin").read_bytes() == wanted
    os.close(staging.fd)


@settings(deadline=None)
@given(st.data())
def test_checksums_of_any_spans_are_correct(data: st.DataObject) -> None:
    runs, at = [], 0
    for _ in range(data.draw(st.integers(0, 4))):
        nbytes, number = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 20))
        stride = nbytes + 4 + data.draw(st.integers(0, 50))
        at += data.draw(st.integers(0, 10))
        runs.append((at, stride, nbytes, number))
        at = ChunkSpan(*runs[-1]).end
    content = random.Random(at).randbytes(at + 3)
    memory = bytearray(content)
    checksums = ChecksumThread(memoryview(memory), parse_spans(data.draw(st.permutations(runs))))
    checksums.wait(len(memory))
    checksums.stop()
    assert bytes(memory) == expected(content, runs)


def test_wait_returns_after_checksums_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline_ckpt_zarr.save.writer.checksum_thread._AT_ONCE", 64)

    def fill(memory: memoryview, run: ChunkSpan) -> None:
        time.sleep(0.0005)
        original(memory, run)

    original = checksum_thread.fill_in
    monkeypatch.setattr(checksum_thread, "fill_in", fill)
    runs = [(0, 1000, 50, 100)]
    content = random.Random(0).randbytes(100_000)
    memory = bytearray(content)
    wanted = expected(content, runs)
    checksums = ChecksumThread(memoryview(memory), parse_spans(runs))
    for end in range(0, 100_000, 777):
        checksums.wait(end)
        assert memory[:end] == wanted[:end]
    checksums.stop()


def test_stop_ends_checksum_thread_early(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, filled = threading.Event(), threading.Event(), []

    def fill(memory: memoryview, run: ChunkSpan) -> None:
        filled.append(run)
        begun.set()
        go.wait(SECONDS)

    monkeypatch.setattr("gangline_ckpt_zarr.save.writer.checksum_thread._AT_ONCE", 8)
    monkeypatch.setattr("gangline_ckpt_zarr.save.writer.checksum_thread.fill_in", fill)
    checksums = ChecksumThread(memoryview(bytearray(1000)), [ChunkSpan(0, 12, 8, 80)])
    begun.wait(SECONDS)
    stops = threading.Thread(target=checksums.stop)
    stops.start()
    while not checksums._stopped:
        time.sleep(0.001)
    go.set()
    stops.join(SECONDS)
    assert len(filled) == 1


def test_checksum_failure_is_raised_by_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(memory: memoryview, run: ChunkSpan) -> None:
        raise ArithmeticError("no sum")

    monkeypatch.setattr("gangline_ckpt_zarr.save.writer.checksum_thread.fill_in", fill)
    checksums = ChecksumThread(memoryview(bytearray(100)), [ChunkSpan(0, 1, 8, 1)])
    with pytest.raises(ArithmeticError, match="no sum"):
        checksums.wait(100)


@pytest.mark.parametrize(
    "runs",
    [[(0, 8, 8, 2)], [(0, 1, 8, 1), (8, 1, 8, 1)], [(-4, 1, 8, 1)], [(0, 1, 0, 1)], [(0, 20, 8, 5), (50, 1, 8, 1)]],
)
def test_overlapping_spans_are_refused(runs: list[tuple[int, int, int, int]]) -> None:
    with pytest.raises(ValueError, match="overlap"):
        parse_spans(runs)
