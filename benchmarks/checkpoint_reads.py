"""Read the state of the checkpoint benchmark back into its memory, in several ways."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from checkpoint_state import State
from checkpoint_ways import BLOCK, checkpointer, quiet
from torch.distributed import checkpoint as dcp

from gangline.checkpoint.id import CheckpointId
from gangline_testkit import rank


class RawRead:
    """Read of the rank's number of bytes from the files of `RawWrite`, into memory that is already allocated."""

    def __init__(self, state: State, folder: str, writers: int) -> None:
        self.memory, self.pieces = memoryview(mmap.mmap(-1, state.nbytes)), []
        for at in range(0, len(self.memory), mmap.PAGESIZE):
            self.memory[at] = 1
        files = [f"{folder}/{number}.raw" for number in range(writers)]
        if rank.world == 1:
            self.pieces = [(path, 0) for path in files]
        else:
            path = files[rank.index % writers]
            self.pieces = [(path, rank.index // writers * (Path(path).stat().st_size // (rank.world // writers or 1)))]

    def __call__(self, folder: str) -> None:
        at = 0
        for path, start in self.pieces:
            file = os.open(path, os.O_RDONLY)
            while at < len(self.memory) and (got := os.preadv(file, [self.memory[at : at + 2 * BLOCK]], start)):
                at, start = at + got, start + got
            os.close(file)


class OurLoad:
    def __init__(self, state: State, folder: str, verify: bool) -> None:
        self.state, self.checkpointer = state, checkpointer(folder, verify)

    def __call__(self, folder: str) -> None:
        for tier in self.checkpointer.tiers:
            tier._metas.clear()  # makes the load read zarr.json again
        self.checkpointer.load(CheckpointId(1), self.state.shards, self.state.registry)


class DcpLoad:
    def __init__(self, state: State, folder: str) -> None:
        self.tensors, self.path = state.dtensors(), f"{folder}/dcp"

    def __call__(self, folder: str) -> None:
        with quiet():
            dcp.load(self.tensors, storage_reader=dcp.FileSystemReader(self.path), no_dist=rank.world == 1)
