"""`checkpoint.durable`, copies of disk checkpoints in a second store: slow, failing, killed and damaged copies.

The copy is written during training. It does not delay training, shows no incomplete checkpoint and reports every
failure.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import Request, urlopen

import fsspec
import pytest
from aiobotocore.session import AioSession
from faulty_proxy import FaultyProxy
from made import composed
from moto.server import ThreadedMotoServer
from stepping import REGISTRY, Job

from gangline.checkpoint.base import SaveFailed, SaveHandle, SaveRequest, SaveState
from gangline.checkpoint.id import CheckpointId
from gangline.mesh import Mesh
from gangline_ckpt_zarr.checkpointer import ZarrCheckpointer
from gangline_ckpt_zarr.commands.verify import find_damage
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.stores.open import open_store
from gangline_ckpt_zarr.tiers.stored import StoreTier
from gangline_testkit import checkpointer_ranks as kit, rank
from gangline_testkit.pool import PRELOAD, PoolBroken, get_pool

SECONDS = 60.0  # maximum wait; a longer wait fails the test


@dataclass
class Place:
    """Bucket behind a proxy that can fail, and the environment variables that give access to it."""

    url: str
    proxy: FaultyProxy
    environment: dict[str, str]

    def hold(self, mark: str, method: str = "PUT") -> Callable[[], None]:
        """Hold back requests whose path contains `mark` until the returned function is called."""
        go = threading.Event()
        self.proxy.fault = lambda asked: go if asked.method == method and mark in asked.path else None
        return go.set

    def ids(self) -> list[int]:
        """Return the steps of which the store shows a checkpoint."""
        return [id.step for id in StoreTier("durable", open_store(self.url)).list_ids()]

    def objects(self, mark: str = "") -> list[str]:
        return [path for path in open_store(self.url).walk() if mark in path]


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with FaultyProxy(server.get_host_and_port()[1]) as proxy, pytest.MonkeyPatch.context() as patch:
        # Parses the S3 service description only once.
        patch.setitem(fsspec.config.conf, "s3", {"session": AioSession()})
        yield proxy
    server.stop()


@pytest.fixture
def place(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    proxy.reset()
    environment = {"AWS_ENDPOINT_URL": proxy.url, "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "a-secret"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for method, path in (("POST", "moto-api/reset"), ("PUT", "durable")):
        urlopen(Request(f"{proxy.url}/{path}", method=method)).close()
    yield Place("s3://durable/run", proxy, environment)
    proxy.reset()


class KeptCopier(WriterClient):
    """Writer process that outlives the checkpointers that use it, because loading the S3 client is slow."""

    def close(self, timeout: float | None = None) -> None:
        """Keep the process until the module ends."""

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def copier() -> Iterator[KeptCopier]:
    found = KeptCopier()
    yield found
    found.end()


@pytest.fixture
def job(tmp_path: Path, place: Place, copier: KeptCopier) -> Iterator[Job]:
    """Yield a run that saves every second step to disk, keeps one, and copies every fourth to the durable store."""
    found = Job(
        tmp_path,
        f"checkpoint.durable={place.url}",
        "checkpoint.durable_every=4",
        "checkpoint.keep_last=1",
        "run.steps=20",
    )
    found.start()._copier = copier
    yield found
    place.proxy.reset()
    found.end()


def begin(job: Job, step: int) -> SaveHandle:
    checkpointer = job.checkpointer
    assert checkpointer is not None
    request = checkpointer.get_due_save(step, 0.1, 2)
    assert request is not None
    return checkpointer.save(request, kit.make_shards(REGISTRY, step), REGISTRY, kit.make_document(step, 1, step))


def on_disk(job: Job) -> list[int]:
    assert job.checkpointer is not None
    return [id.step for id in job.checkpointer.disk.list_ids()]


def hasty(job: Job) -> Job:
    """Set the deadline of writer processes for a store to one second; return the job."""
    assert job.checkpointer is not None
    job.checkpointer.config.deadline_seconds = 1.0
    return job


def recovers(job: Job, place: Place) -> None:
    """Remove the faults of the store, and set the long deadline again."""
    place.proxy.reset()
    patient(job)


def patient(job: Job) -> None:
    """Give the store the long deadline of a busy machine, from the next save on."""
    assert job.checkpointer is not None
    job.checkpointer.config.deadline_seconds = SECONDS


def test_slow_durable_copy_does_not_block_disk_saves(job: Job, place: Place) -> None:
    go = place.hold("step-00000004")
    first = begin(job, 4)
    first.visible.result()
    assert first.state is SaveState.VISIBLE
    assert first.progress < 1
    for step in (6, 10):
        handle = begin(job, step)
        handle.settled.result()
        assert handle.state is SaveState.SETTLED
        assert handle.progress == 1
        assert on_disk(job) == [4, step], "what is being copied is gone, or something else stayed"
        assert job.load(step) == []
    assert place.ids() == []
    next_one = threading.Thread(target=lambda: begin(job, 12).settled.result(), daemon=True)
    next_one.start()
    next_one.join(0.2)
    assert next_one.is_alive(), "two copies at a time"
    assert on_disk(job) == [4, 10]
    go()
    next_one.join(SECONDS)
    assert not next_one.is_alive()
    job.end()
    assert place.ids() == [4, 12]
    assert on_disk(job) == [12]


def test_last_save_settles_after_durable_copy(job: Job, place: Place) -> None:
    go = place.hold("step-00000020")
    handle = begin(job, 20)
    assert handle.state in (SaveState.WRITING, SaveState.VISIBLE)
    threading.Timer(0.1, go).start()
    handle.settled.result()
    assert place.ids() == [20]
    assert handle.state is SaveState.SETTLED


def test_last_save_waits_for_pending_durable_copy(job: Job, place: Place) -> None:
    go = place.hold("step-00000004")
    begin(job, 4).visible.result()
    assert job.checkpointer is not None
    threading.Timer(0.1, go).start()
    shards = kit.make_shards(REGISTRY, 5)
    job.checkpointer.save(SaveRequest(5, last=True), shards, REGISTRY, kit.make_document(5, 1, 5)).settled.result()
    assert place.ids() == [4, 5]


@pytest.mark.parametrize("fault", [503, "hang"])
def test_failed_durable_copy_fails_the_save(job: Job, place: Place, fault: int | str) -> None:
    hasty(job)
    place.proxy.fault = lambda asked: fault if asked.method == "PUT" else None
    with pytest.raises(SaveFailed, match=rf"step-00000004 .*: the copy to {place.url} failed: .*no success within 1 s"):
        job.step(4)
    recovers(job, place)
    assert job.load(4) == []
    assert place.objects() == []
    job.step(8)
    assert place.ids() == [8]


def test_late_durable_copy_failure_fails_original_save(job: Job, place: Place) -> None:
    hasty(job)
    place.proxy.fault = lambda asked: "hang" if asked.method == "PUT" else None
    handle = begin(job, 4)
    handle.visible.result()
    begin(job, 6).settled.result()
    with pytest.raises(SaveFailed, match="step-00000004 could not be saved: the copy to"):
        handle.settled.result(SECONDS)
    assert handle.state is SaveState.FAILED
    assert job.load(4) == []
    recovers(job, place)
    begin(job, 8).settled.result(SECONDS)
    assert place.ids() == [8]


def test_failed_durable_copy_does_not_fail_waiting_save(job: Job, place: Place) -> None:
    place.proxy.fault = lambda asked: 403 if "step-00000004" in asked.path and asked.method == "PUT" else None
    failed = begin(job, 4)
    failed.visible.result()
    patient(job)
    handle = begin(job, 8)
    for _ in range(2):  # a rollback reads the failure before the loop reports it
        with pytest.raises(SaveFailed, match="step-00000004 could not be saved: the copy to"):
            failed.settled.result()
    handle.settled.result()
    assert place.ids() == [8]


def test_close_waits_for_a_copy_that_fails(job: Job, place: Place) -> None:
    hasty(job)
    place.proxy.fault = lambda asked: 503 if asked.method == "PUT" else None
    handle = begin(job, 4)
    handle.visible.result()
    job.end()
    assert "checkpoint step-00000004 could not be saved: the copy to" in str(handle.settled.exception(0))


def test_last_save_retries_failed_durable_copy(job: Job, place: Place) -> None:
    """Save once more, as the loop does after a failed save: disk data stays unchanged, and only the copy is made."""
    hasty(job)
    place.proxy.fault = lambda asked: 503 if asked.method == "PUT" else None
    checkpointer = job.checkpointer
    assert checkpointer is not None
    with pytest.raises(SaveFailed):
        begin(job, 20).settled.result()
    write_id = checkpointer.disk.read_meta(CheckpointId(20)).write_id
    recovers(job, place)
    for _ in range(2):  # the second save finds the copy complete
        checkpointer.save(
            SaveRequest(20, last=True), kit.make_shards(REGISTRY, 3), REGISTRY, kit.make_document(20, 1, 20)
        ).settled.result()
        assert place.ids() == [20]
        assert [part for part in place.objects() if write_id not in part] == ["step-00000020/zarr.json"]
    assert job.load(20) == []


def test_save_deadline_bounds_durable_copy(job: Job, place: Place) -> None:
    """Set a deadline, as before the processes are killed: the save must fail in time although the store is silent."""
    place.proxy.fault = lambda asked: "hang" if asked.method == "PUT" else None
    assert job.checkpointer is not None
    request = SaveRequest(4, last=True, deadline_seconds=1.0)
    handle = job.checkpointer.save(request, kit.make_shards(REGISTRY, 4), REGISTRY, kit.make_document(4, 1, 4))
    with pytest.raises(SaveFailed, match="no success within 1 s"):
        handle.settled.result()
    assert job.load(4) == []


def rot(content: bytes) -> bytes:
    return content[:70] + bytes([content[70] ^ 8]) + content[71:]


@pytest.mark.parametrize("what", ["flipped", "cut off", "lost", "of another step"])
def test_damaged_data_file_is_named_and_not_copied(job: Job, place: Place, what: str) -> None:
    job.step(2)
    (other,) = (job.run_dir / "checkpoints" / "step-00000002").rglob("*.bin")
    elsewhere = other.read_bytes()
    go = place.hold(".bin", "HEAD")  # holds the copy before it reads the disk file
    handle = begin(job, 4)
    handle.visible.result()
    (data,) = (job.run_dir / "checkpoints" / "step-00000004").rglob("*.bin")
    if what == "flipped":
        data.write_bytes(rot(data.read_bytes()))
    elif what == "cut off":
        os.truncate(data, 80)
    elif what == "lost":
        data.unlink()
    else:
        data.write_bytes(elsewhere)
    go()
    with pytest.raises(SaveFailed, match=rf"model/embed.weight\[0:\d+, 0:\d+\] in {data} is damaged"):
        handle.settled.result(SECONDS)
    assert place.objects() == []
    job.step(8)
    assert place.ids() == [8]


def test_damaged_zarr_json_is_not_copied(job: Job, place: Place) -> None:
    go = place.hold(".bin")
    handle = begin(job, 4)
    handle.visible.result()
    text = job.run_dir / "checkpoints" / "step-00000004" / "zarr.json"
    text.write_bytes(rot(text.read_bytes()))
    go()
    with pytest.raises(SaveFailed, match=f"{text} is damaged"):
        handle.settled.result(SECONDS)
    assert place.objects() == []


def test_killed_copier_fails_copy_and_is_restarted(job: Job, place: Place) -> None:
    go = place.hold(".bin")
    assert job.checkpointer is not None
    job.checkpointer._copier = WriterClient()
    handle = begin(job, 4)
    handle.visible.result()
    while job.checkpointer._copier.pid is None:
        assert not handle.settled.done()
    os.kill(job.checkpointer._copier.pid, signal.SIGKILL)
    with pytest.raises(SaveFailed, match=r"the copy to .* failed: .* was killed by SIGKILL"):
        handle.settled.result(SECONDS)
    go()
    assert place.objects("zarr.json") == []
    job.step(8)
    assert [path for path in place.objects() if "step-00000008" not in path] == []
    assert job.load(8) == []


# --- several ranks ---

MESH = Mesh.of({"dp_shard": 2})
PRELOAD.append("s3fs")  # imported once in the server that forks the ranks, not in each rank


def job_of(directory: Path, name: str, *words: str) -> kit.CheckpointerJob:
    run = composed(directory, *words)
    return kit.CheckpointerJob("gangline_ckpt_zarr.checkpointer:build", run, MESH, f"{directory}-{name}")


def opened(job: kit.CheckpointerJob, environment: dict[str, str]) -> ZarrCheckpointer:
    os.environ.update(environment)
    found = kit.open_checkpointer(job)
    assert isinstance(found, ZarrCheckpointer)
    return found


def save_and_copy(job: kit.CheckpointerJob, environment: dict[str, str], steps: tuple[int, ...]) -> list[str]:
    """Save each step without waiting for durable copies; return the checkpoint id or the error of each save."""
    checkpointer = opened(job, environment)
    checkpointer.config.deadline_seconds = SECONDS
    saves = [kit.save_with(checkpointer, job, step, step) for step in steps]
    checkpointer.close()
    return [str(save.settled.exception() or save.id) for save in saves]


def test_ranks_copy_separate_files_with_one_commit(tmp_path: Path, place: Place) -> None:
    job = job_of(tmp_path, "all", f"checkpoint.durable={place.url}")
    names = ["step-00000001", "step-00000002", "step-00000003"]
    assert get_pool(2).run(save_and_copy, job, place.environment, (1, 2, 3)) == [names] * 2
    assert place.ids() == [1, 2, 3]
    assert len(place.objects(".bin")) == 6
    store = open_store(place.url)
    for id in StoreTier("durable", store).list_ids():
        meta = StoreTier("durable", store).read_meta(id)
        there = open_store(f"{place.url}/{id}")
        assert [find_damage(there, meta, rank, lambda size: None) for rank in range(2)] == [[], []]


def test_copy_failure_of_one_rank_fails_all(tmp_path: Path, place: Place) -> None:
    file = re.compile(r"step-00000001/data-\w+/00001")
    place.proxy.fault = lambda asked: 403 if asked.method == "PUT" and file.search(asked.path) else None
    job = job_of(tmp_path, "one", f"checkpoint.durable={place.url}")
    first, second = get_pool(2).run(save_and_copy, job, place.environment, (1, 2))
    assert first == second
    assert first[0].startswith("checkpoint step-00000001 could not be saved: the copy to")
    assert first[1] == "step-00000002"
    assert place.ids() == [2]
    assert len(place.objects(".bin")) == 2


def save_and_die(job: kit.CheckpointerJob, environment: dict[str, str], victim: int, seconds: float) -> None:
    checkpointer, registry = opened(job, environment), kit.build_registry(MESH, job.large)
    checkpointer.save(
        SaveRequest(1), kit.make_shards(registry, 1), registry, kit.make_document(1, 1, 1)
    ).visible.result()
    if rank.index == victim:
        threading.Event().wait(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()


def check_after_a_kill(tmp_path: Path, url: str, environment: dict[str, str]) -> None:
    """Check that visible checkpoints are complete, and that the next save works and removes the remains of the copy."""
    store = open_store(url)
    tier = StoreTier("durable", store)
    before = tier.list_ids()
    for id in before:
        there = open_store(f"{url}/{id}")
        assert [find_damage(there, tier.read_meta(id), number, lambda size: None) for number in range(2)] == [[], []]
    after = job_of(tmp_path, "after", f"checkpoint.durable={url}")
    assert get_pool(2).run(save_and_copy, after, environment, (2,)) == [["step-00000002"]] * 2
    assert tier.list_ids() == [*before, CheckpointId(2)]
    assert {path.partition("/")[0] for path in store.walk()} == {str(id) for id in tier.list_ids()}


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_during_upload_leaves_no_visible_checkpoint(tmp_path: Path, place: Place, victim: int) -> None:
    """Kill a rank whose own file is being uploaded, or is uploaded already."""
    dies, go = job_of(tmp_path, "dies", f"checkpoint.durable={place.url}"), place.hold("00000.bin")
    with pytest.raises(PoolBroken):
        get_pool(2).run(save_and_die, dies, place.environment, victim, 1.0, grace=0.3)
    assert place.ids() == []
    go()
    place.proxy.reset()
    check_after_a_kill(tmp_path, place.url, place.environment)


# By default an immediate kill of rank 0 and a late kill of rank 1; the kills between them are nightly.
@pytest.mark.parametrize("moment", [0, 5, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2, 3, 4))])
def test_kill_during_copy_leaves_no_partial_checkpoint(tmp_path: Path, moment: int) -> None:
    url = str(tmp_path / "durable")
    dies = replace(job_of(tmp_path, "dies", f"checkpoint.durable={url}"), large=512)
    with pytest.raises(PoolBroken):
        get_pool(2).run(save_and_die, dies, {}, moment % 2, 0.03 * moment, grace=0.3)
    check_after_a_kill(tmp_path, url, {})
