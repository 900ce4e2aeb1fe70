"""The memory tier: the staging buffers themselves, as files on tmpfs, which outlive the worker that filled them.

A save to it costs nothing beyond staging: when the ranks of all machines are done, their buffers get the names of a
checkpoint's files. Two buffers a rank take turns, so the newest whole one stays while the next is filled. A sidecar of
the launcher owns the directory and removes it when the job ends; a worker that is killed leaves it alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.checkpoint.base import CheckpointId
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.format.metadata import NAME
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_ckpt_zarr.tiers import Tier

if TYPE_CHECKING:  # the sidecar and the tools that come here have no use for torch
    from gangline.comm import Store
    from gangline_ckpt_zarr.staging import Staging

ROOT = Path("/dev/shm")
SPARE = "spare"


def directory(run_dir: str | Path) -> Path:
    """Where a run's memory tier lies on each machine."""
    digest = blake2b(os.path.realpath(run_dir).encode(), digest_size=8).hexdigest()
    return ROOT / f"gangline-{os.getuid()}" / digest


def keep(run_dir: str) -> None:
    """The sidecar: the directory is there for as long as the job."""
    place = directory(run_dir)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})
    shutil.rmtree(place, ignore_errors=True)


class MemoryTier(Tier):
    """This machine's memory. Its checkpoints count where every machine of the job has them."""

    def __init__(self, run_dir: str | Path, every: int, job: Store | None) -> None:
        super().__init__("memory", LocalStore(directory(run_dir)), every)
        self.root = directory(run_dir)
        rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.machine, self.machines = rank // here, int(os.environ.get("WORLD_SIZE", "1")) // here
        self.leads = local == 0  # of the ranks of this machine
        self.scope = str(self.machine)
        self._buffers: list[Staging] = []  # the one filled last comes last
        self._lies: dict[Staging, CheckpointId] = {}  # the checkpoints that they are files of
        self._common: set[CheckpointId] | None = None
        if self.leads and job is not None:  # a run's own worker, not a tool that looks
            super().clear()
            shutil.rmtree(self.root / SPARE, ignore_errors=True)
        if self.machines > 1 and job is not None:
            self._agree(job)

    def _agree(self, job: Store) -> None:
        """Which checkpoints all machines have."""
        talk = Agreement(job, "ckpt/memory", self.machine, self.machines)
        if self.leads:
            talk.say(f"of {self.machine}", [str(id) for id in super().ids()])
            if self.machine == 0:
                held = [set(talk.hear(f"of {machine}")) for machine in range(self.machines)]
                talk.say("common", sorted(set.intersection(*held)))
        self._common = {id for text in talk.hear("common") if (id := CheckpointId.parse(text)) is not None}

    def ids(self) -> list[CheckpointId]:
        """Those of this machine that all had when the job began, and those saved since."""
        found, own = super().ids(), self._lies.values()
        return found if self._common is None else [id for id in found if id in self._common or id in own]

    def commits(self, rank: int) -> bool:
        """One rank of each machine puts zarr.json there."""
        return self.leads

    def clear(self) -> None:
        """Nothing: what is no checkpoint any more may hold a buffer that its rank has yet to take back."""

    def buffer(self, rank: int) -> Staging:
        """The buffer for the next save: never the one that the newest checkpoint lies in."""
        from gangline_ckpt_zarr.staging import Staging

        spare = self.root / SPARE / f"{rank:05d}.{len(self._buffers) % 2}"
        if len(self._buffers) < 2:
            spare.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            spare.unlink(missing_ok=True)  # an earlier worker's, perhaps of another size
            self._buffers.append(Staging(str(spare)))
        else:
            self._buffers.reverse()
            self._take_back(self._buffers[-1])
        return self._buffers[-1]

    def _take_back(self, buffer: Staging) -> None:
        """No longer part of a checkpoint: first that is no checkpoint any more, then the file is spare again."""
        id = self._lies.pop(buffer, None)
        if id is not None:
            (self.root / str(id) / NAME).unlink(missing_ok=True)
            spare = self.root / SPARE / f"{secrets.token_hex(8)}"
            os.rename(buffer.path, spare)
            with contextlib.suppress(OSError):  # the last rank of the machine to leave turns off the light
                os.removedirs(os.path.dirname(buffer.path))
            buffer.path = str(spare)

    def adopt(self, buffer: Staging, id: CheckpointId, path: str) -> None:
        """The sealed buffer becomes a checkpoint's file; `path`: its name in the store."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.rename(buffer.path, place)
        buffer.path = str(place)
        self._lies[buffer] = id

    def prune(self, run_dir: str, saved: CheckpointId) -> None:
        """What no buffer of this worker lies in is an earlier worker's."""
        for id in self.ids():
            if id != saved and id not in self._lies.values():
                self.store.delete(str(id))

    def close(self) -> None:
        """Let go of the buffers; the files stay."""
        for buffer in self._buffers:
            buffer.close()
