"""Hung ranks and writer processes: the save fails, silent ranks are reported, training continues."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from gangline.checkpoint.base import SaveFailed
from gangline.config.compose import compose_one
from gangline.launch.guard import wait_for_end
from gangline.mesh import Mesh
from gangline_ckpt_zarr.agreement import Agreement, Failed
from gangline_ckpt_zarr.checkpointer import ZarrCheckpointer
from gangline_ckpt_zarr.save import transfer
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.save.writer.messages import StagedMemory
from gangline_testkit import checkpointer_ranks as kit, rank
from gangline_testkit.pool import get_pool

MESH = Mesh.of({"dp_shard": 2})
SECONDS = 60.0


def opened(job: kit.CheckpointerJob) -> ZarrCheckpointer:
    transfer.GRACE = 1.0
    found = kit.open_checkpointer(job)
    assert isinstance(found, ZarrCheckpointer)
    return found


def outcome(checkpointer: ZarrCheckpointer, job: kit.CheckpointerJob, step: int) -> str:
    """Save a step and return its id or the failure; step 2, which hangs, has a deadline of 1.5 s."""
    checkpointer.config.deadline_seconds = 1.5 if step == 2 else SECONDS
    try:
        return str(kit.save_with(checkpointer, job, step, step).id)
    except SaveFailed as failed:
        return failed.why


@pytest.fixture
def job(tmp_path: Path) -> Iterator[kit.CheckpointerJob]:
    words = ["recipe=tiny", "checkpoint=zarr", f"run.dir={tmp_path}"]
    grace = transfer.GRACE
    yield kit.CheckpointerJob("gangline_ckpt_zarr.checkpointer:build", compose_one(words), MESH, str(tmp_path))
    get_pool(2).run(be_patient, grace)


def be_patient(grace: float) -> None:
    transfer.GRACE = grace


def whole(job: kit.CheckpointerJob) -> set[str]:
    """Return the visible checkpoints."""
    return {path.parent.name for path in Path(job.run.job.dir).rglob("zarr.json")}


def save_with_a_stopped_writer(job: kit.CheckpointerJob) -> list[str]:
    """Save three steps with the writer process of rank 1 stopped before the second; check that it is then replaced."""
    checkpointer = opened(job)
    came = [outcome(checkpointer, job, 1)]
    pid = checkpointer._writer.pid
    assert pid is not None
    if rank.index == 1:
        os.kill(pid, signal.SIGSTOP)
    came += [outcome(checkpointer, job, 2), outcome(checkpointer, job, 3)]
    if rank.index == 1:
        assert wait_for_end(pid, SECONDS)
        assert checkpointer._writer.pid not in (None, pid)
    checkpointer.close()
    return came


def test_stopped_writer_fails_save_on_all_ranks(job: kit.CheckpointerJob) -> None:
    came = get_pool(2).run(save_with_a_stopped_writer, job)
    why = "the writer process made no progress within 4 s"
    assert came == [["step-00000001", why, "step-00000003"]] * 2
    assert whole(job) == {"step-00000001", "step-00000003"}
    left = {path.name for path in (Path(job.run.job.dir) / "checkpoints").iterdir()}
    assert left == whole(job)


def save_beside_a_stopped_rank(job: kit.CheckpointerJob) -> list[str]:
    """Save three steps; rank 0 stops rank 1 before the second, and resumes it after its own save has failed."""
    checkpointer, store = opened(job), dist.PrefixStore(f"{job.token}/test", rank.make_comms(job.mesh).store)  # type: ignore
    came = [outcome(checkpointer, job, 1)]
    if rank.index == 1:
        store.set("pid", str(os.getpid()))
        store.get("go")
    else:
        pid = int(store.get("pid"))
        os.kill(pid, signal.SIGSTOP)
        came.append(outcome(checkpointer, job, 2))
        os.kill(pid, signal.SIGCONT)
        store.set("go", "")
    if rank.index == 1:
        came.append(outcome(checkpointer, job, 2))
    came.append(outcome(checkpointer, job, 3))
    checkpointer.close()
    return came


def test_stopped_rank_is_named_and_others_continue(job: kit.CheckpointerJob) -> None:
    came = get_pool(2).run(save_beside_a_stopped_rank, job)
    why = "rank 1 has not answered within 5 s"
    assert came == [["step-00000001", why, "step-00000003"]] * 2
    assert whole(job) == {"step-00000001", "step-00000003"}


# --- waits for other ranks ---


def together(world: int, patience: float, act: Callable[[Agreement], None], store: dist.Store) -> list[str]:
    """Run `act` and a wait on `world` ranks, as threads; return the failure that each rank receives."""
    heard = [""] * world

    def run(rank: int) -> None:
        agreement = Agreement(store, "save/1", rank, world, patience, "newest")  # type: ignore[arg-type]
        try:
            act(agreement)
            agreement.wait_for_all("written")
        except Failed as failed:
            heard[rank] = f"{failed.what}{' (late)' if failed.late else ''}"

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return heard


def test_wait_names_all_silent_ranks() -> None:
    def act(agreement: Agreement) -> None:
        if agreement.rank not in (1, 3):
            agreement.mark_done("written")

    store = dist.HashStore()
    before = [Agreement(store, "save/0", number, 5, 1.0, "newest") for number in range(5)]  # type: ignore[arg-type]
    for agreement in before:  # answers to an earlier save must not count for this one
        agreement.mark_done("written")
    assert together(5, 1.0, act, store) == ["ranks 1, 3 have not answered within 1 s (late)"] * 5


def test_wait_truncates_list_of_silent_ranks() -> None:
    def act(agreement: Agreement) -> None:
        if agreement.rank == 0:
            agreement.mark_done("written")

    (first, *_) = together(12, 1.0, act, dist.HashStore())
    assert first == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more have not answered within 1 s (late)"


def test_wait_does_not_time_out_during_progress() -> None:
    """Send heartbeats for longer than the timeout, as ranks do with a slow store or files of unequal size."""

    def act(agreement: Agreement) -> None:
        if agreement.rank == 1:
            end = time.monotonic() + 5.0
            while time.monotonic() < end:
                agreement.send_heartbeat()
                time.sleep(0.01)
        agreement.mark_done("written")

    assert together(3, 3.0, act, dist.HashStore()) == [""] * 3


def test_wait_without_timeout_is_unlimited() -> None:
    go, over = threading.Event(), []

    def act(agreement: Agreement) -> None:
        agreement.patience = None
        if agreement.rank == 1:
            go.wait(SECONDS)
        agreement.mark_done("written")

    runs = threading.Thread(target=lambda: over.extend(together(2, 0.01, act, dist.HashStore())), daemon=True)
    runs.start()
    runs.join(0.3)
    assert runs.is_alive()
    go.set()
    runs.join(SECONDS)
    assert over == ["", ""]


def test_abandoned_writer_does_not_block_next_write(tmp_path: Path) -> None:
    writer = WriterClient()
    writer.start()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)
    first = writer.write(StagedMemory(0), [], (str(tmp_path), "a"))
    writer.give_up()
    assert writer.wait(first, SECONDS).failed == "the writer process was killed after no progress"
    for number in range(3):
        assert writer.wait(writer.write(StagedMemory(0), [], (str(tmp_path), str(number))), SECONDS).done
    writer.close()
