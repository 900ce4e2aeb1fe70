"""Memory tier in one process: retention, reads, deletion, and failures of disk, keeper and memory."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from made import composed
from stepping import REGISTRY, Job

from gangline.checkpoint.base import SaveFailed, SaveRequest
from gangline.checkpoint.id import CheckpointId
from gangline.errors import BadCheckpoint, UserError
from gangline.launch.guard import read_birth, read_namespace
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline_ckpt_zarr.checkpointer import build
from gangline_ckpt_zarr.commands.ls import _note_abandoned
from gangline_ckpt_zarr.tiers import places
from gangline_ckpt_zarr.tiers.keeper import ABANDONED_SECONDS, OWNER, RUN, sweep
from gangline_ckpt_zarr.tiers.memory import MemoryTier
from gangline_testkit import checkpointer_ranks as kit

MEMORY = "checkpoint.memory_every=1"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path, MEMORY)
    yield found
    found.end()
    shutil.rmtree(places.locate_node(tmp_path), ignore_errors=True)


def kill_the_writer(job: Job) -> None:
    assert job.checkpointer is not None
    process = job.checkpointer._writer._process
    assert process is not None
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def test_memory_tier_keeps_newest_two_checkpoints(job: Job) -> None:
    job.start()
    for step in range(1, 8):
        assert job.step(step) == (["memory"] if step % 2 else ["memory", "disk"])
        assert job.load(step) == []
        if step > 1:
            assert "memory" in job.where(step - 1)
            assert job.load(step - 1) == []
        if step > 2:
            assert "memory" not in job.where(step - 2)


def test_memory_tier_outlives_the_worker(job: Job) -> None:
    job.start()
    for step in (1, 2, 3):
        job.step(step)
    job.start()
    assert job.newest == CheckpointId(3)
    assert job.load(3) == []
    for step in (4, 5, 6, 7):
        job.step(step)
        assert job.load(step) == []
    assert job.where(3) == job.where(2)[:0] == []
    assert len(list(places.locate_node(job.run_dir).glob("step-*"))) == 2


def test_checkpoints_of_earlier_workers_use_bounded_memory(job: Job) -> None:
    job.start()
    for step in (1, 2, 3):
        job.step(step)
    job.start()
    job.step(4)
    assert job.where(2) == ["disk"]
    assert len(list(places.locate_node(job.run_dir).rglob("*.bin"))) == 1


def test_recreated_run_ignores_old_memory_checkpoints(job: Job) -> None:
    """Delete the run directory but not the memory, as after a kill of the job and its sidecar."""
    job.start()
    job.step(1)
    job.end()
    shutil.rmtree(job.run_dir)
    job.run_dir.mkdir()
    assert job.start().list() == []
    assert list(places.locate_node(job.run_dir).iterdir()) == []


@contextmanager
def keeper(run_dir: Path, log: Path, *prefix: str) -> Iterator[None]:
    """Start the keeper, and enter once it has reported that its address is not published.

    `prefix`: a command that runs the keeper.
    """
    words = [str(os.getpid()), "10.0", "gangline_ckpt_zarr.tiers.keeper:keep", str(run_dir), "[0.0]"]
    with log.open("w") as file:
        command = [*prefix, sys.executable, "-m", "gangline_basics.launch.sidecars", *words]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    trouble, until = places.locate_node(run_dir) / places.TROUBLE, time.monotonic() + 120
    while not trouble.exists() or not trouble.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until
        time.sleep(0.01)
    yield
    process.terminate()
    assert process.wait(120) == 0
    assert log.read_text() == ""
    assert not trouble.parent.exists(), "nobody else gives memory back"


def test_memory_of_killed_runs_is_reported_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that memory of live, starting and recent runs and of other process id namespaces stays."""
    monkeypatch.setattr(places, "ROOT", tmp_path)
    child = subprocess.Popen(["sleep", "1000"])
    dead, live = (
        f"{read_namespace()}-{child.pid}-{read_birth(child.pid)}-a",
        f"{read_namespace()}-{os.getpid()}-{read_birth(os.getpid())}-b",
    )
    child.kill()
    child.wait()
    old = time.time() - ABANDONED_SECONDS - 60
    made = {}
    for name, owner, changed in (
        ("killed", dead, old),
        ("lives", live, old),
        ("recent", dead, time.time()),
        ("small", dead, time.time()),
        ("elsewhere", "1-2-3-c", old),
        ("starts", dead, old),
    ):
        made[name] = places.locate_node(f"/runs/{name}")
        made[name].mkdir(parents=True)
        (made[name] / OWNER).write_text(owner)
        (made[name] / RUN).write_text(f"/runs/{name}")
        (made[name] / "0.bin").touch()
        os.truncate(made[name] / "0.bin", 1_040_000_000 if name != "small" else 900_000_000)
        os.utime(made[name], (changed, changed))
    places.locate_user().chmod(0o700)
    _note_abandoned("/runs/starts")
    noted = capsys.readouterr().err
    assert re.findall(r"of the killed run (/runs/\w+), ", noted) == re.findall(r"resume=(/runs/\w+)", noted)
    assert sorted(re.findall(r"rm -r (\S+)", noted)) == sorted(str(made[name]) for name in ("killed", "recent"))
    assert noted.count("1.04 GB of memory") == 2, noted
    assert sweep("/runs/starts") == [made["killed"]]
    assert [name for name, place in made.items() if not place.exists()] == ["killed"]


def test_keeper_without_published_address_keeps_local_checkpoints(job: Job, tmp_path: Path) -> None:
    (tmp_path / ".memory" / "lock").mkdir(parents=True)
    with keeper(tmp_path, tmp_path / "log"):
        checkpointer = job.start()
        (note,) = checkpointer.take_notices()
        why = "other nodes cannot use the memory tier of this node, because its address could not be published: "
        assert f"{why}{tmp_path}" in note
        assert ".memory/lock: Is a directory. The run continues" in note
        assert f"rm -r {tmp_path}/.memory" in note
        job.step(1)
        assert checkpointer.take_notices() == []
        assert job.start().find_latest() == CheckpointId(1)
        job.end()


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs a file of another user")
def test_keeper_names_owner_of_unreadable_lock_file(tmp_path: Path) -> None:
    lock = tmp_path / ".memory" / "lock"
    lock.parent.mkdir()
    lock.touch(0o600)
    os.chown(lock, 54321, 54321)
    with keeper(tmp_path, tmp_path / "log", "setpriv", "--bounding-set=-all", "--inh-caps=-all"):
        said = (places.locate_node(tmp_path) / places.TROUBLE).read_text()
        assert f"{lock}: Permission denied; owned by user 54321, this process runs as user 0. The run continues" in said


@pytest.mark.parametrize("again", [1, 2, 3])
def test_failed_save_keeps_earlier_memory_checkpoint(job: Job, again: int) -> None:
    """Kill the writer process before it has sealed the buffer, one or more times; later saves use memory as before."""
    job.start()
    for step in (1, 2, 3):
        job.step(step)
    step = 3
    for _ in range(again):
        step += 2
        kill_the_writer(job)
        job.checkpointer._writer.start = lambda fds=None: None  # type: ignore[method-assign]  # prevents a restart
        with pytest.raises(SaveFailed, match="SIGKILL"):
            job.step(step)
        del job.checkpointer._writer.start
        assert job.where(3) == ["memory"]
        assert job.load(3) == []
    for step in range(20, 26):
        assert "memory" in job.step(step)
        assert job.load(step) == []
    assert len(list(places.locate_node(job.run_dir).rglob("*.bin"))) == 2


def test_failed_disk_save_keeps_memory_checkpoints(job: Job) -> None:
    checkpointer = job.start()
    job.step(1)
    (job.run_dir / "checkpoints").write_text("no directory")
    with pytest.raises(SaveFailed):
        job.step(2)
    assert "memory" in [tier.name for tier in checkpointer.tiers if tier.has(CheckpointId(2))]
    assert job.checkpointer.memory.list_ids() == [CheckpointId(1), CheckpointId(2)]
    (job.run_dir / "checkpoints").unlink()
    for step in (3, 4, 5):
        job.step(step)
        assert job.load(step) == []


def test_memory_tier_survives_external_deletion(job: Job) -> None:
    """Delete the files, as some systems do with a user's files in /dev/shm at logout."""
    job.start()
    for step in (1, 2, 3):
        job.step(step)
    shutil.rmtree(places.locate_node(job.run_dir))
    assert job.checkpointer.list() == [CheckpointId(2)]
    for step in (4, 5, 6, 7):
        assert "memory" in job.step(step)
        assert job.load(step) == []


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:9] + bytes([content[9] ^ 2]) + content[10:])


@pytest.mark.parametrize("what", ["chunk", "file", "zarr.json"])
def test_damaged_memory_checkpoint_is_read_from_disk(job: Job, what: str) -> None:
    checkpointer = job.start()
    for step in (1, 2):
        job.step(step)
    place = places.locate_node(job.run_dir) / "step-00000002"
    (data,) = place.rglob("*.bin")
    if what == "chunk":
        flip(data)
    elif what == "file":
        data.unlink()
    else:
        flip(place / "zarr.json")
    checkpointer = job.start()
    at_start = checkpointer.take_notices()
    assert checkpointer.read_document(CheckpointId(2))["step"] == 2
    assert job.load(2) == []
    (note,) = at_start or checkpointer.take_notices()
    assert str(place.parent) in note
    assert ("checkpoint step-00000002 in" in note and "cannot be loaded" in note) == (what != "chunk")
    assert (f"loading the copy in {job.run_dir}/checkpoints instead" in note) == (what == "chunk")
    assert checkpointer.take_notices() == []


def test_checkpoint_damaged_in_every_tier_is_refused(job: Job) -> None:
    """Check that the checkpoint counts as damaged, and that the one before it loads."""
    job.start()
    for step in (1, 2):
        job.step(step)
    for place in (places.locate_node(job.run_dir), job.run_dir / "checkpoints"):
        (data,) = (place / "step-00000002").rglob("*.bin")
        flip(data)
    with pytest.raises(BadCheckpoint, match=str(places.locate_node(job.run_dir))):
        job.load(2)
    assert job.load(1) == []


def test_copies_of_two_saves_are_never_mixed(job: Job) -> None:
    """Restore step 2 of an earlier worker in memory: the bits of a repeated step 2 on disk may differ."""
    job.start()
    for step in (1, 2):
        job.step(step)
    aside = job.run_dir / "aside"
    shutil.copytree(places.locate_node(job.run_dir) / "step-00000002", aside)
    (data,) = aside.rglob("*.bin")
    flip(data)
    job.end()
    shutil.rmtree(places.locate_node(job.run_dir))
    shutil.rmtree(job.run_dir / "checkpoints")
    job.start()
    for step in (1, 2):
        job.step(step)
    shutil.rmtree(places.locate_node(job.run_dir) / "step-00000002")
    shutil.copytree(aside, places.locate_node(job.run_dir) / "step-00000002")
    job.start()
    with pytest.raises(BadCheckpoint, match="gangline-"):
        job.load(2)


def test_last_memory_checkpoint_is_saved_to_disk(job: Job) -> None:
    """Restart after a worker died with the last step only in memory, so that no step is left to train."""
    job.words = (MEMORY, "run.steps=3")
    checkpointer = job.start()
    for step in (1, 2):
        job.step(step)
    job.words = (MEMORY, "run.steps=99")
    job.start()
    job.step(3)
    job.words = (MEMORY, "run.steps=3")
    checkpointer = job.start()
    assert job.newest == CheckpointId(3)
    assert not checkpointer.is_lasting(CheckpointId(3))
    shards = kit.make_shards(REGISTRY, 3)
    checkpointer.save(SaveRequest(3, last=True), shards, REGISTRY, kit.make_document(3, 1, 3)).settled.result()
    assert checkpointer.is_lasting(CheckpointId(3))
    assert job.where(3) == ["memory", "disk"]
    assert job.load(3) == []


def test_last_save_skips_copy_to_other_nodes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the last save, which has little time, goes to disk only."""
    copied: list[tuple[str, float]] = []

    def copy(self: MemoryTier, id: CheckpointId, path: str, seconds: float, waiting: Callable[[], None]) -> str:
        waiting()
        copied.append((str(id), seconds))
        return "request to node b failed"

    monkeypatch.setattr(MemoryTier, "copy", copy)
    job.start()
    checkpointer = job.checkpointer
    assert checkpointer is not None
    shards = kit.make_shards(REGISTRY, 3)
    checkpointer.save(
        SaveRequest(2, deadline_seconds=7.0), shards, REGISTRY, kit.make_document(2, 1, 3)
    ).settled.result()
    assert copied == [("step-00000002", 7.0)]
    assert "files of 1 rank not copied to other nodes: request to node b failed" in " ".join(
        checkpointer.take_notices()
    )
    checkpointer.save(SaveRequest(3, last=True), shards, REGISTRY, kit.make_document(3, 1, 3)).settled.result()
    assert len(copied) == 1
    assert list(checkpointer.take_notices()) == []
    assert checkpointer.is_lasting(CheckpointId(3))


def test_memory_tier_distinguishes_attempts(job: Job) -> None:
    """Save the same steps again after a rollback: names differ, and abandoned checkpoints are not the latest."""
    checkpointer = job.start()
    for step in (1, 2, 3, 4):
        job.step(step)
    attempts.append(job.run_dir, Attempt(2, "step-00000002"))
    assert checkpointer.find_latest() == CheckpointId(2)
    assert job.load(2) == []
    assert job.step(3, attempt=2) == ["memory"]
    assert job.step(4, attempt=2) == ["memory", "disk"]
    assert checkpointer.find_latest() == CheckpointId(4, 2)
    job.start()
    assert job.newest == CheckpointId(4, 2)
    assert job.load(4, 2) == []


def test_tool_lists_memory_checkpoints_without_changes(job: Job) -> None:
    job.start()
    job.step(1)
    run = composed(job.run_dir, "checkpoint.memory_every=1")
    tool = build(run.checkpoint, run, None)
    assert tool.list() == [CheckpointId(1)]
    tool.close()
    assert job.load(1) == []


def test_unreadable_tier_fails_start_but_not_running_job(job: Job, monkeypatch) -> None:
    """Check that only a start fails: the tier may have the newest checkpoint; later a nearer tier has a newer one."""
    job.start()
    for step in (1, 2):
        job.step(step)

    def forbidden(path: str = "") -> list[str]:
        raise PermissionError(13, "Forbidden")

    checkpointer = job.start()
    disk = next(tier for tier in checkpointer.tiers if tier.name == "disk")
    monkeypatch.setattr(disk.store, "names", forbidden)
    monkeypatch.setattr(disk.store, "list_holders", forbidden)
    with pytest.raises(UserError, match="cannot be read: Forbidden"):
        checkpointer.find_latest()
    job.save(3)
    assert checkpointer.find_latest() == CheckpointId(3)
    assert any("cannot be read: Forbidden; using the other tiers" in note for note in checkpointer.take_notices())


@pytest.fixture
def full_tmpfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail allocations for files of the memory tier, but not for anonymous memory."""
    allocate = os.posix_fallocate

    def without_room(fd: int, offset: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(places.locate_user())):
            raise OSError(28, "No space left on device")
        allocate(fd, offset, size)

    monkeypatch.setattr("os.posix_fallocate", without_room)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.usefixtures("full_tmpfs")
def test_full_memory_tier_is_skipped_by_saves(job: Job, first: int) -> None:
    """Start with step 1, which is saved only to memory, or with step 2, which is saved to memory and disk."""
    found = job.start()
    if first == 1:
        with pytest.raises(SaveFailed, match=r"/dev/shm on .* cannot hold [\d,]+ bytes more: No space left on device"):
            job.step(1)
    assert job.step(2) == ["disk"]
    notes = found.take_notices()
    assert len(notes) == 1
    assert "saves skip the memory tier until the ranks restart" in notes[0]
    assert "StagedMemory" not in notes[0]
    assert found.get_due_save(3, 0.1, 2) is None
    assert job.step(4) == ["disk"]
    assert job.load(4) == []
    assert not found.take_notices()
