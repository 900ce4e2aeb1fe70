"""Write the state of the checkpoint benchmark with gangline and others; each way returns when its bytes are durable."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from shutil import rmtree
from time import perf_counter
from typing import Any

import torch
from checkpoint_state import State
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from gangline.checkpoint.base import SaveHandle, SaveRequest
from gangline.checkpoint.id import CheckpointId
from gangline.config.defaults import build_default_run
from gangline.mesh import Mesh
from gangline.shard import Shard
from gangline_ckpt_zarr.checkpointer import ZarrCheckpointer, build as build_checkpointer
from gangline_ckpt_zarr.config import ZarrCheckpoint
from gangline_ckpt_zarr.format import packed
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_ckpt_zarr.save.staging import Staging
from gangline_ckpt_zarr.save.transfer import write_file
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.stores.base import ObjectPath
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_testkit import rank

BLOCK = 8 << 20
Way = Callable[[str], None]  # argument: folder


def sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def barrier() -> None:
    if rank.world > 1:
        torch.distributed.barrier()


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class RawWrite:
    """Raw write of the same number of bytes: O_DIRECT from aligned memory into a preallocated file."""

    def __init__(self, state: State) -> None:
        size = sum(shard.local.nbytes for shard in state.own())
        self.memory = memoryview(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))
        at = 0
        for shard in state.own():
            self.memory[at : at + shard.local.nbytes] = shard.local.reshape(-1).view(torch.uint8).numpy().data
            at += shard.local.nbytes

    def __call__(self, folder: str) -> None:
        file = os.open(f"{folder}/{rank.index}.raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        os.posix_fallocate(file, 0, len(self.memory))
        for at in range(0, len(self.memory), BLOCK):
            os.pwrite(file, self.memory[at : at + BLOCK], at)
        os.fsync(file)
        os.close(file)
        sync(folder)


class FromStaging:
    """gangline's writer process on staged memory: checksums, the file, and the commit by rank 0."""

    def __init__(self, state: State) -> None:
        self.registry, self.files = state.registry, PackedFiles(state.registry)
        self.file = self.files.get_rank_file(rank.index)
        self.staging, self.writer = Staging(), WriterClient()
        self.writer.start([self.staging.fd])
        self.staging.fill(self.file, state.shards)

    def __call__(self, folder: str) -> None:
        path = packed.get_data_path("0badcafe", rank.index)
        write_file(
            self.writer, self.staging, self.file, "0badcafe", ObjectPath(folder, path), 600.0, lambda share: None
        )
        barrier()
        if rank.index == 0:
            content = packed.write(self.registry, self.files, {"step": 0, "attempt": 1}, "0badcafe")
            LocalStore(folder).commit(NAME, content)

    @property
    def helper(self) -> int | None:
        return self.writer.pid

    def close(self) -> None:
        self.writer.close()
        self.staging.close()


class Ours:
    """`checkpoint=zarr` as in a run: staging, writing, commit. Each call saves the next step."""

    def __init__(self, state: State, folder: str) -> None:
        self.state, self.step, self.blocked = state, 0, 0.0
        self.checkpointer = checkpointer(folder)

    def __call__(self, folder: str) -> None:
        self.save().settled.result()

    def save(self) -> SaveHandle:
        self.step += 1
        document = {"step": self.step, "attempt": 1}
        handle = self.checkpointer.save(SaveRequest(self.step), self.state.shards, self.state.registry, document)
        self.blocked = handle.blocked_seconds
        return handle

    def forget(self) -> None:
        """Delete the latest save."""
        barrier()
        if rank.index == 0:
            self.checkpointer.tiers[0].store.delete(str(CheckpointId(self.step)))

    @property
    def helper(self) -> int | None:
        return self.checkpointer._writer.pid

    def close(self) -> None:
        self.checkpointer.close()


def checkpointer(folder: str, verify: bool = True) -> ZarrCheckpointer:
    """Return the checkpointer of a run on this rank."""
    config = ZarrCheckpoint(path=f"{folder}/ours", verify=verify)
    run = build_default_run(run={"dir": folder, "steps": 1 << 30}, checkpoint=config)
    store = rank.make_comms(Mesh.of({"dp_shard": rank.world})).store if rank.world > 1 else None
    return build_checkpointer(config, run, store)


class Dcp:
    def __init__(self, state: State) -> None:
        self.tensors = state.dtensors()

    def __call__(self, folder: str) -> None:
        with quiet():
            dcp.save(self.tensors, storage_writer=dcp.FileSystemWriter(f"{folder}/dcp"))


class TorchSave:
    def __init__(self, state: State) -> None:
        self.tensors = {shard.name: shard.local for shard in state.own()}

    def __call__(self, folder: str) -> None:
        path = f"{folder}/{rank.index}.pt"
        torch.save(self.tensors, path)
        sync(path)
        sync(folder)


class Safetensors(TorchSave):
    def __call__(self, folder: str) -> None:
        path = f"{folder}/{rank.index}.safetensors"
        save_file(self.tensors, path)
        sync(path)
        sync(folder)


class Ocdbt:
    """TensorStore: zarr v3 in one OCDBT database per rank, as Orbax writes it, without a merge afterwards."""

    def __init__(self, state: State) -> None:
        self.own = state.own()

    def __call__(self, folder: str) -> None:
        import tensorstore

        context = tensorstore.Context({"file_io_concurrency": {"limit": 4}, "data_copy_concurrency": {"limit": 2}})
        transaction = tensorstore.Transaction()
        arrays = [
            tensorstore.open(self._spec(shard, folder), context=context, transaction=transaction) for shard in self.own
        ]
        written = [
            array.result().write(shard.local.numpy(), can_reference_source_data_indefinitely=True)
            for array, shard in zip(arrays, self.own, strict=True)
        ]
        for one in written:
            one.copy.result()
        transaction.commit_async().result()

    @staticmethod
    def _spec(shard: Shard, folder: str) -> dict[str, Any]:
        shape = list(shard.local.shape)
        grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
        return {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": {"driver": "file", "path": f"{folder}/ocdbt.{rank.index}/"},
                "path": f"{shard.name}/",
            },
            "metadata": {"shape": shape, "data_type": "float32", "chunk_grid": grid, "codecs": codecs},
            "store_data_equal_to_fill_value": True,
            "create": True,
        }


def has_tensorstore() -> bool:
    try:
        import tensorstore  # noqa: F401
    except ImportError:
        return False
    return True


class Memcpy:
    """Copy of the state into memory that is already allocated: the lower bound of the time that blocks a step."""

    def __init__(self, state: State) -> None:
        self.pairs = [(torch.zeros_like(shard.local).add_(1), shard.local) for shard in state.own()]

    def __call__(self, folder: str) -> None:
        for target, source in self.pairs:
            target.copy_(source)


class DcpAsync:
    """torch's asynchronous save with default options. `blocked`: seconds of the call."""

    def __init__(self, state: State) -> None:
        self.tensors, self.blocked = state.dtensors(), 0.0
        self.future: Future[Any] = Future()

    def start(self, folder: str) -> None:
        if rank.index == 0:
            rmtree(f"{folder}/dcp-async", ignore_errors=True)
        barrier()
        began = perf_counter()
        with quiet():
            future = dcp.async_save(self.tensors, storage_writer=dcp.FileSystemWriter(f"{folder}/dcp-async"))
        assert isinstance(future, Future)
        self.future, self.blocked = future, perf_counter() - began

    def wait(self) -> None:
        self.future.result()
