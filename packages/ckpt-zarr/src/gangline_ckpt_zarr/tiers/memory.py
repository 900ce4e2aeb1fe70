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
import time
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, final

from gangline import BadCheckpoint
from gangline.checkpoint import CheckpointId, Mesh
from gangline.tools import attempts
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.format.overlap import meeting
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_ckpt_zarr.tiers.base import Tier

if TYPE_CHECKING:  # the sidecar and the tools that come here have no use for torch
    from gangline.comm import Store as JobStore
    from gangline.config import Run
    from gangline_ckpt_zarr.save.staging import Staging

ROOT = Path("/dev/shm")
SPARE = "spare"
LAST_WORDS = 5.0  # seconds in which ranks end when their launcher was killed; less than a sidecar then has


def directory(run_dir: str | Path) -> Path:
    """Where a run's memory tier lies on each machine."""
    digest = blake2b(os.path.realpath(run_dir).encode(), digest_size=8).hexdigest()
    return ROOT / f"gangline-{os.getuid()}" / digest


def keep(run_dir: str) -> None:
    """The sidecar: the directory is there for as long as the job."""
    place, launcher = directory(run_dir), os.getppid()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})
    shutil.rmtree(place, ignore_errors=True)
    if os.getppid() != launcher:  # it was killed, and ranks that die of it may be in the middle of a save
        end = time.monotonic() + LAST_WORDS
        while time.monotonic() < end:
            time.sleep(0.1)
            shutil.rmtree(place, ignore_errors=True)


@final
class MemoryTier(Tier):
    """This machine's memory. A checkpoint counts where every machine of the job can fill its ranks from its own."""

    def __init__(self, run: Run, every: int, job: JobStore | None) -> None:
        self._run_dir = run.run.dir or ""
        self.root = directory(self._run_dir)
        super().__init__("memory", LocalStore(self.root), every)
        self._rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        world, self._here = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.machine, self.machines = self._rank // self._here, world // self._here
        self.leads = local == 0  # of the ranks of this machine
        self.scope = str(self.machine)
        self._buffers: list[Staging] = []
        self._holds: dict[Staging, CheckpointId] = {}  # the checkpoint that each is a file of, oldest first
        self._own: list[CheckpointId] = []  # saved by these workers, oldest first
        self._found: set[CheckpointId] | None = None  # what counts of what earlier workers left; None: a tool looks
        if job is not None:
            self._begin(run, job)

    def _begin(self, run: Run, job: JobStore) -> None:
        """Find what earlier workers of the run have left here, and delete what cannot be loaded from."""
        if not attempts.read(self._run_dir):  # the run has not begun: whatever is here is of another of its name
            self._found = set()
        elif self.machines == 1:
            self._found = {*super().ids()}
        else:
            mesh = Mesh.of(run.parallel.axes(self.machines * self._here))
            self._found = self._agree(job, {id for id in super().ids() if self._fills(id, mesh)})
        if self.leads:
            for name in self.store.names():
                if CheckpointId.parse(name) not in self._found:
                    shutil.rmtree(self.root / name, ignore_errors=True)
        agreement = Agreement(job, "memory", self._rank, self.machines * self._here)
        if self.leads:
            agreement.publish(f"clean {self.machine}", True)
        agreement.wait_for(f"clean {self.machine}")  # or the first buffer of a rank might be deleted as a leftover

    def _agree(self, job: JobStore, found: set[CheckpointId]) -> set[CheckpointId]:
        """The checkpoints that every machine has found."""
        agreement = Agreement(job, "machines", self.machine, self.machines)
        if self.leads:
            agreement.publish(f"of {self.machine}", [str(id) for id in sorted(found)])
            if self.machine == 0:
                held = [set(agreement.wait_for(f"of {machine}")) for machine in range(self.machines)]
                agreement.publish("common", sorted(set.intersection(*held)))
        return {id for text in agreement.wait_for("common") if (id := CheckpointId.parse(text)) is not None}

    def _fills(self, id: CheckpointId, mesh: Mesh) -> bool:
        """Whether the files here hold all that this machine's ranks need, in the layout that saved."""
        try:
            meta = self.meta(id)
        except (BadCheckpoint, OSError):
            return False
        registry = meta.registry
        if registry.mesh != mesh:
            return False
        first = self.machine * self._here
        boxes = {
            (name, box)
            for rank in range(first, first + self._here)
            for name in registry
            for box, _ in registry.of_rank(name, rank)
            if box.size
        }
        writers = {writer for name, box in boxes for writer, _ in meeting(registry, name, box)}
        return all(self.store.exists(self.path(id, meta, writer)) for writer in writers)

    def ids(self) -> list[CheckpointId]:
        """Those left by earlier workers that can be loaded from, and those saved since."""
        there = super().ids()
        return there if self._found is None else [id for id in there if id in self._found or id in self._own]

    def commits(self, rank: int) -> bool:
        """The first rank of each machine."""
        return self.leads

    def target(self, path: str) -> None:
        """None: a buffer on tmpfs becomes the file."""

    def clear(self) -> None:
        """Nothing: a directory without zarr.json may hold a buffer that its rank will take back."""

    def buffer(self, rank: int) -> Staging:
        """The buffer for the next save: never the one that the newest checkpoint is in. Raises OSError."""
        from gangline_ckpt_zarr.save.staging import Staging

        if len(self._buffers) < 2:
            self._make_room()
            spare = self.root / SPARE / f"{rank:05d}.{secrets.token_hex(4)}"
            spare.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._buffers.append(Staging(str(spare)))
            return self._buffers[-1]
        buffer = next((one for one in self._buffers if one not in self._holds), None) or next(iter(self._holds))
        self._take_back(buffer)
        if os.path.exists(buffer.path):
            return buffer
        self._buffers.remove(buffer)  # somebody has cleaned up /dev/shm, as some systems do when a user logs out
        buffer.close()
        return self.buffer(rank)

    def _make_room(self) -> None:
        """Keep only the newest that earlier workers left: two of them and a new buffer may be more than fits."""
        if self.leads:
            newest = next((id for id in attempts.branch(self._run_dir, self.ids()) if self._counts(id)), None)
            for id in self._found or ():
                if id != newest:
                    self.store.delete(str(id))

    def _counts(self, id: CheckpointId) -> bool:
        """Whether a checkpoint is whole here; of several machines each has a part, which `_fills` has looked at."""
        return self.machines > 1 or not self.lacks(id)

    def _take_back(self, buffer: Staging) -> None:
        """Make a buffer spare: first zarr.json goes, so that the rest is no checkpoint, then the file is renamed."""
        id = self._holds.pop(buffer, None)
        if id is None:
            return
        (self.root / str(id) / NAME).unlink(missing_ok=True)
        spare = self.root / SPARE / secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):
            os.rename(buffer.path, spare)
        with contextlib.suppress(OSError):  # the last rank of the machine deletes the directory
            os.removedirs(os.path.dirname(buffer.path))
        buffer.path = str(spare)

    def adopt(self, staging: Staging, id: CheckpointId, path: str) -> None:
        """The sealed buffer gets the name of the checkpoint's file. Raises OSError."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.rename(staging.path, place)
        staging.path = str(place)
        self._holds[staging] = id

    def abandon(self, id: CheckpointId, path: str) -> None:
        """The save came to nothing: its buffer is spare again."""
        for buffer in [one for one, held in self._holds.items() if held == id]:
            self._take_back(buffer)

    def saved(self, id: CheckpointId) -> None:
        super().saved(id)
        self._own = [*self._own[-1:], id]

    def prune(self, run_dir: str, kept: Collection[CheckpointId]) -> None:
        """Delete what earlier workers left; the buffers of these workers are taken back one by one."""
        for id in self._found or ():
            self.store.delete(str(id))

    def close(self) -> None:
        """Let go of the buffers; the files stay."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers, self._holds = [], {}
