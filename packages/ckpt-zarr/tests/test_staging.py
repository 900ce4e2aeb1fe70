"""Staging memory of saves: preparation during the first steps, and identical bytes without preparation."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import made
import pytest
import torch

from gangline.checkpoint.base import SaveRequest
from gangline.config.defaults import build_default_run
from gangline.mesh import Mesh
from gangline.shard import Layout, Registry, Shard
from gangline_ckpt_zarr.checkpointer import ZarrCheckpointer, build
from gangline_ckpt_zarr.config import ZarrCheckpoint
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_ckpt_zarr.save.staging import Staging

REGISTRY = Registry.of(Mesh.of({}), {"model/w": Layout((300, 50)), "model/b": Layout((50,), "bfloat16")})


def shards(registry: Registry, add: int = 0) -> list[Shard]:
    return [
        Shard(
            name, layout.shape, getattr(torch, layout.dtype), (0,) * len(layout.shape), made.whole(name, layout) + add
        )
        for name, layout in registry.layouts.items()
    ]


def checkpointer(directory: Path, **options) -> ZarrCheckpointer:
    config = ZarrCheckpoint(every=1, **options)
    return build(config, build_default_run(run={"dir": str(directory)}, checkpoint=config), None)


def test_prepared_staging_memory_holds_equal_bytes() -> None:
    file = PackedFiles(REGISTRY).get_rank_file(0)
    content = []
    for prepare in (False, True):
        staging = Staging()
        if prepare:
            staging.prepare(file)
        staging.fill(file, shards(REGISTRY))
        content.append(staging._bytes.clone())
        staging.prepare(file)  # memory in use keeps its content
        assert torch.equal(staging._bytes, content[-1])
        staging.close()
    assert torch.equal(*content)


@pytest.mark.parametrize("memory_every", [None, 1])
def test_first_save_uses_prepared_memory(tmp_path: Path, memory_every: int | None) -> None:
    found = checkpointer(tmp_path, memory_every=memory_every)
    found.prepare(REGISTRY)
    assert found._buffers._preparing is not None
    found._buffers._preparing.join()
    prepared = found._buffers._prepared
    assert prepared is not None
    assert prepared.size >= PackedFiles(REGISTRY).get_rank_file(0).size
    for step in (1, 2, 3):
        found.save(SaveRequest(step), shards(REGISTRY, step), REGISTRY, {"step": step, "attempt": 1}).settled.result()
        assert found._buffers._prepared is None
        found.prepare(REGISTRY)  # the loop prepares again after a rollback, without effect
        assert found._buffers._preparing is None
    for id in found.list():
        wanted = shards(REGISTRY)
        found.load(id, wanted, REGISTRY)
        for got, put in zip(wanted, shards(REGISTRY, id.step), strict=True):
            assert torch.equal(got.local, put.local)
    found.close()
    if found.memory is not None:  # no sidecar of a launcher deletes it here
        shutil.rmtree(found.memory.root)


def test_run_without_saves_prepares_no_memory(tmp_path: Path) -> None:
    found = checkpointer(tmp_path)
    found.config.every, found.config.at_end = None, False
    found.prepare(REGISTRY)
    assert found._buffers._preparing is None
    found.close()


def test_failed_memory_preparation_does_not_fail_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    found = checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        found.prepare(REGISTRY)
        assert found._buffers._preparing is not None
        found._buffers._preparing.join()
    found.save(SaveRequest(1), shards(REGISTRY), REGISTRY, {"step": 1, "attempt": 1}).settled.result()
    assert len(found.list()) == 1
    found.close()


@pytest.mark.parametrize("limit", [1, 3000, 1 << 28])
@pytest.mark.parametrize("chunks", [{}, {"model/w": (64, 16), "model/b": (7,)}, {"model/w": (300, 8)}])
def test_gpu_chunks_are_copied_contiguously_in_file_order(chunks, limit, monkeypatch) -> None:
    """Check that each transfer is contiguous on both sides, because only then it can use pinned memory."""
    file, staging, other = PackedFiles(REGISTRY, chunks).get_rank_file(0), Staging(), Staging()
    local = {(shard.name, shard.offset): shard.local for shard in shards(REGISTRY)}
    travelled: list[int] = []

    def send(together: torch.Tensor, target: torch.Tensor) -> None:
        assert together.is_contiguous()
        assert target.is_contiguous()
        assert together.dtype == target.dtype
        assert together.shape == target.shape
        travelled.append(together.numel())
        target.copy_(together)

    monkeypatch.setattr(staging, "_send", send)
    for each in (staging, other):
        each._fit(file)
    staging._copy_chunks(local, torch.device("cpu"), limit)
    other._copy(local)
    assert torch.equal(staging._bytes, other._bytes)
    largest = max(run.stride for run in file.runs)
    assert max(travelled) <= max(limit, largest)
    assert len(travelled) == (sum(run.count for run in file.runs) if limit == 1 else len(travelled))
    for each in (staging, other):
        each.close()


def test_staging_works_without_pinned_memory(monkeypatch) -> None:
    """Refuse to pin memory, as limits on locked memory do: the rank continues without an error."""
    staging = Staging()
    staging._fit(PackedFiles(REGISTRY).get_rank_file(0))
    asked: list[int] = []

    class Runtime:
        def cudaHostRegister(self, *given: int) -> int:
            asked.append(1)
            return 2

    def refuses(code: int) -> None:
        raise RuntimeError(f"CUDA error {code}: out of memory")

    def launches(*size: int, device: str) -> None:
        launched.append(device)
        raise RuntimeError("the error that CUDA kept of the call before")

    launched: list[str] = []
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", refuses)
    monkeypatch.setattr(torch, "zeros", launches)
    staging._pin()
    staging._pin()
    assert (staging._pinned, asked) == (False, [1])
    assert launched == ["cuda"], "the next kernel of the run would raise the error of the refused call"
    staging.close()


def test_memory_is_pinned_before_the_first_save(tmp_path: Path, monkeypatch) -> None:
    """Prepare saves in a process that uses GPU 3; stubs of CUDA record where and what is pinned, and its release."""
    calls: list[tuple[object, ...]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("pin", threading.current_thread().name, size))
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            calls.append(("unpin",))

    found = checkpointer(tmp_path)
    with monkeypatch.context() as stubs:
        stubs.setattr(torch.cuda, "is_initialized", lambda: True)
        stubs.setattr(torch.cuda, "current_device", lambda: 3)
        stubs.setattr(torch.cuda, "set_device", lambda gpu: calls.append(("device", gpu)))
        stubs.setattr(torch.cuda, "cudart", Runtime)
        stubs.setattr(torch.cuda, "check_error", lambda code: None)
        found.prepare(REGISTRY)
        found._buffers._join()
        size = PackedFiles(REGISTRY).get_rank_file(0).size
        assert calls == [("device", 3), ("pin", "prepare", size)]
        staging = found._buffers._prepared
        assert staging is not None
        staging._pin()
        assert len(calls) == 2, "the first save finds the memory pinned"
        larger = Registry.of(Mesh.of({}), {"model/w": Layout((600, 50))})
        staging._fit(PackedFiles(larger).get_rank_file(0))
        assert calls[2:] == [("unpin",)], "before the memory is replaced"
        staging._pin()
        found.close()
        assert calls[3:] == [("pin", "MainThread", staging.size), ("unpin",)]
