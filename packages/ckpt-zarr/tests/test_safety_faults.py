"""Real runs with a full disk, a read-only disk, a failing store, a killed rank or a killed writer process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from faulty_proxy import Asked, FaultyProxy
from moto.server import ThreadedMotoServer
from runs import Runs, can_mount, on_a_disk_that_cannot_be_written, on_a_small_disk

from gangline.cli.main import main
from gangline_ckpt_zarr.tiers import places
from gangline_testkit.processes import find_children, find_rank_processes

BUCKETS = count()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with Runs(tmp_path) as found:
        yield found


def notes(records: list[dict]) -> str:
    return "\n".join(note for record in records for note in record["notes"])


def test_full_disk_fails_saves_but_training_continues(runs: Runs, tmp_path: Path, capsys) -> None:
    """Give the disk room for one checkpoint of 360 kB: later saves fail, and the end of the run reports it."""
    prefix = on_a_small_disk(tmp_path / "disk", tmp_path / "kept", 500)
    words = ("run.dir=out", "run.steps=9", "checkpoint.every=2", "parallel=ddp", "launch.processes=2")
    printed = runs.train(*words, f"checkpoint.path={tmp_path}/disk", code=2, prefix=prefix)
    records = runs.read_records("out")
    assert [record["step"] for record in records] == list(range(1, 10))
    room = "No space left on device" if can_mount() else "File too large"
    assert f"could not be saved: {room}" in printed
    assert "training continues" in printed
    assert f"could not be saved: {room}" in notes(records)
    whole = ["step-00000002"] if can_mount() else []
    assert [record["saved"] for record in records if record["saved"]] == whole
    assert sorted({*re.findall(r"  saved (step-\d+)", printed)}) == whole, "what only began was said to be saved"
    assert re.findall(r"  saving (step-\d+)", printed) == [f"step-{step:08d}" for step in (2, 4, 6, 8, 9)]
    for step in (4, 6, 8):  # not step 9: the last save is retried
        assert len(re.findall(rf"checkpoint step-0000000{step} could not be saved", printed)) == 1
    assert room in records[-1]["failed_save"]
    newest = "The newest complete checkpoint is step-00000002." if can_mount() else "There is no earlier checkpoint."
    assert re.search(rf"train: the last checkpoint could not be saved: .*\n.*{newest}", printed)
    assert "Traceback" not in printed
    if can_mount():
        data = sorted(path.relative_to(tmp_path / "kept").parts[0] for path in (tmp_path / "kept").rglob("*.bin"))
        assert data == ["step-00000002"] * 2, "what is left of failed saves keeps the disk full"
        left = [path for path in (tmp_path / "kept").rglob("*") if "step-00000002" not in path.parts]
        assert not [path for path in left if path.is_file()]  # a rank that failed late may leave an empty directory
        assert main(["ckpt", "verify", str(tmp_path / "kept" / "step-00000002")]) == 0


def test_read_only_disk_fails_saves_but_training_continues(runs: Runs, tmp_path: Path) -> None:
    prefix = on_a_disk_that_cannot_be_written(tmp_path / "disk")
    printed = runs.train(
        "run.dir=out", "run.steps=4", "checkpoint.every=2", f"checkpoint.path={tmp_path}/disk", code=2, prefix=prefix
    )
    assert [record["step"] for record in runs.read_records("out")] == [1, 2, 3, 4]
    assert "Read-only file system" in printed if can_mount() else "Not a directory" in printed
    assert "There is no earlier checkpoint." in printed
    assert "Traceback" not in printed


@pytest.fixture
def proxy(runs: Runs) -> Iterator[FaultyProxy]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with FaultyProxy(server.get_host_and_port()[1]) as proxy:
        runs.environment.update(
            AWS_ENDPOINT_URL=proxy.url,
            AWS_ACCESS_KEY_ID="someone",
            AWS_SECRET_ACCESS_KEY="a-secret",
            AWS_DEFAULT_REGION="us-east-1",
        )
        proxy.bucket = f"bucket-{next(BUCKETS)}"  # type: ignore[attr-defined]  # moto servers share their buckets
        with urlopen(Request(f"{proxy.url}/{proxy.bucket}", method="PUT")):
            proxy.reset()
        yield proxy
    server.stop()


def test_failing_durable_store_fails_only_affected_saves(runs: Runs, proxy: FaultyProxy) -> None:
    """Answer 503 to all writes of step 10 and nothing to writes of step 20; the disk has all steps.

    The save of step 20 reports the failed copy of step 10, and ends before the save of step 30 begins.
    """

    def fault(asked: Asked) -> int | str | None:
        if asked.method == "PUT" and "step-00000010" in asked.path:
            return 503
        return "hang" if asked.method == "PUT" and "step-00000020" in asked.path else None

    proxy.fault = fault
    words = ("run.dir=out", "run.steps=40", "checkpoint.every=10", "checkpoint.deadline_seconds=5")
    printed = runs.train(*words, f"checkpoint.durable=s3://{proxy.bucket}/run", "parallel=ddp", "launch.processes=2")
    records = runs.read_records("out")
    assert [record["step"] for record in records] == list(range(1, 41))
    for step in (10, 20):
        assert re.search(rf"checkpoint step-000000{step} could not be saved: .*no success within 5 s", printed)
    assert "checkpoint step-00000010 could not be saved" in notes(records)
    assert any("no success within 5 s" in (record["failed_save"] or "") for record in records)
    assert "secret" not in printed
    places = sorted(path.parent.name for path in (runs.directory / "out" / "checkpoints").glob("*/zarr.json"))
    assert places == ["step-00000010", "step-00000020", "step-00000030", "step-00000040"]
    proxy.reset()
    kept = "".join(sorted(objects(proxy)))
    assert "step-00000030/zarr.json" in kept
    assert "step-00000040/zarr.json" in kept
    assert "step-00000010/zarr.json" not in kept
    assert "step-00000020/zarr.json" not in kept


def objects(proxy: FaultyProxy) -> list[str]:
    with urlopen(f"{proxy.url}/{proxy.bucket}?list-type=2") as answer:
        return re.findall(r"<Key>(.*?)</Key>", answer.read().decode())


def test_resume_stops_if_store_does_not_answer(runs: Runs, proxy: FaultyProxy) -> None:
    """Check that the run neither starts from scratch nor falls back to an older checkpoint nor restarts repeatedly."""
    words = ("run.steps=4", "checkpoint.every=2", "checkpoint.deadline_seconds=4", "launch.max_restarts=3")
    runs.train("run.dir=out", *words, f"checkpoint.path=s3://{proxy.bucket}/run", "run.steps=2")
    before = runs.read_attempts("out")
    proxy.fault = lambda asked: 503
    printed = runs.train("resume=out", "run.steps=4", code=2)
    assert re.search(rf"s3://{proxy.bucket}/run cannot be read: .*no success within 4 s", printed)
    assert "train resume=" in printed
    assert "restart" not in printed
    assert "Traceback" not in printed
    assert runs.read_attempts("out") == before
    proxy.reset()
    data = [key for key in objects(proxy) if key.endswith(".bin")]
    proxy.fault = lambda asked: 503 if data[0] in asked.path else None
    printed = runs.train("resume=out", "run.steps=4", code=2)
    assert re.search(r"checkpoint step-00000002 cannot be read: .*no success within 4 s", printed)
    assert runs.read_attempts("out") == before
    proxy.reset()
    runs.train("resume=out", "run.steps=4")
    assert [record["step"] for record in runs.read_records("out")] == [1, 2, 3, 4]


def wait_until_whole(process: subprocess.Popen[str], place: Path, step: int) -> None:
    """Wait until this step or a later one is complete in memory, where two buffers alternate and the newest stays."""
    deadline = time.monotonic() + 240
    while not any(int(path.parent.name.removeprefix("step-")) >= step for path in place.glob("step-*/zarr.json")):
        assert process.poll() is None, f"ended early:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline, f"step {step} was not in memory in 240 s"
        time.sleep(0.02)


def test_killed_rank_restarts_from_memory_checkpoint(runs: Runs) -> None:
    """Resume with no checkpoint on disk; losses and gradient norms must equal those of an undisturbed run."""
    words = ("checkpoint.every=null", "parallel=ddp", "launch.processes=2", "run.deterministic=on")
    words += ("schedule.warmup_steps=5",)  # independent of run.steps
    memory = ("run.steps=100000", "checkpoint.memory_every=5", "launch.max_restarts=1")
    process = runs.fork("run.dir=out", *words, *memory)
    place = places.locate_node(runs.directory / "out")
    wait_until_whole(process, place, 15)
    os.kill(find_rank_processes(runs.directory / "out")[1], signal.SIGKILL)
    printed, last = runs.end(process, "out", 8)
    assert "restart 1 of 1" in printed
    first, second = runs.read_attempts("out")
    assert first["start"] is None
    assert int(second["start"].removeprefix("step-")) >= 15
    assert not place.exists()
    assert [path.parent.name for path in (runs.directory / "out" / "checkpoints").glob("*/zarr.json")] == [
        f"step-{last:08d}"
    ]
    runs.train("run.dir=alone", *words, f"run.steps={last}")
    curve = [(record["step"], record["loss"], record["grad_norm"]) for record in runs.read_records("out")]
    assert curve == [(record["step"], record["loss"], record["grad_norm"]) for record in runs.read_records("alone")]


def test_memory_is_freed_after_launcher_is_killed(runs: Runs) -> None:
    process = runs.fork("run.dir=out", "run.steps=100000", "checkpoint.every=null", "checkpoint.memory_every=1")
    runs.wait_for_step(process, "out", 3)
    place = places.locate_node(runs.directory / "out")
    assert list(place.glob("step-*"))
    process.kill()
    deadline = time.monotonic() + 60
    while place.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])


def test_resume_falls_back_from_damaged_checkpoint_or_stops(runs: Runs) -> None:
    """Damage the newest checkpoint: the run falls back and reports it.

    Then damage all checkpoints: the run reports each once and does not restart.
    """
    checkpoints = runs.directory / "out" / "checkpoints"
    runs.train("run.dir=out", "run.steps=4", "checkpoint.every=2", "launch.max_restarts=3")
    (path,) = (checkpoints / "step-00000004").rglob("*.bin")
    damage(path)
    printed = runs.train("resume=out", "run.steps=6")
    assert f"in {path} is damaged: its checksum differs; falling back to the previous checkpoint" in printed
    assert "falling back" in notes(runs.read_records("out"))
    assert runs.read_attempts("out")[-1]["start"] == "step-00000002"
    assert [record["attempt"] for record in runs.read_records("out")] == [1, 1, 2, 2, 2, 2]
    shutil.rmtree(checkpoints / "step-00000004")
    for path in checkpoints.rglob("*.bin"):
        damage(path)
    before, whole = runs.read_attempts("out"), len([*checkpoints.rglob("zarr.json")])
    printed = runs.train("resume=out", "run.steps=8", code=2)
    assert "can be read" in printed
    assert printed.count("is damaged: its checksum differs") == whole == 3
    assert "restart" not in printed
    assert "Traceback" not in printed
    assert runs.read_attempts("out") == before


def test_killed_writer_fails_save_but_training_continues(runs: Runs) -> None:
    process = runs.fork("run.dir=out", "run.steps=100000", "checkpoint.every=2", "checkpoint.keep_last=2")
    runs.wait_for_step(process, "out", 10)
    for step in range(20, 60, 10):
        runs.wait_for_step(process, "out", step)
        for pid, command in find_children(find_rank_processes(runs.directory / "out")[0]).items():
            assert "save.writer.process" in command or not command  # a zombie has no command line
            os.kill(pid, signal.SIGKILL)
    printed, last = runs.end(process, "out", 10)
    records = runs.read_records("out")
    assert [record["step"] for record in records] == list(range(1, last + 1))
    assert "was killed by SIGKILL" in printed
    assert "was killed by SIGKILL" in notes(records)
    assert records[-1]["failed_save"] is None
    assert "Traceback" not in printed
