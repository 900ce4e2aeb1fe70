"""Memory tier: the staging buffers themselves, as files on tmpfs, which outlive the worker that filled them.

A save to the memory tier costs nothing beyond staging: each rank renames its buffer to the checkpoint's file. A rank
alternates between two buffers, so the newest complete checkpoint stays while the next one is staged. With copies, other
nodes also store each file before the checkpoint counts as complete, so a lost node loses no checkpoint (Gemini, SOSP
2023, section 4). A sidecar of the launcher owns the directory (`keeper.py`), which stays when a worker is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, final

from gangline import BadCheckpoint, UserError
from gangline.checkpoint.id import CheckpointId
from gangline.launch.network import name_of_this_node
from gangline.run import attempts
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.tiers.base import Tier
from gangline_ckpt_zarr.tiers.copies import Copies
from gangline_ckpt_zarr.tiers.memory_store import MemoryStore
from gangline_ckpt_zarr.tiers.peers import Peer, ask_peers, list_announced
from gangline_ckpt_zarr.tiers.places import ROOT, SPARE, TROUBLE, locate_node, make, refuse_other_owner
from gangline_ckpt_zarr.tiers.survey import Survivor, find_survivors

if TYPE_CHECKING:  # tools that import this do not need torch
    from gangline.comm.base import Store as JobStore
    from gangline.config import Run
    from gangline_ckpt_zarr.save.staging import Staging


@final
class MemoryTier(Tier):
    """Tier in this machine's memory. A checkpoint is complete if the live nodes together have all ranks' files."""

    store: MemoryStore

    def __init__(self, run: Run, every: int, job: JobStore | None, copies: int = 0) -> None:
        self._run_dir = run.job.dir or ""
        self.root = locate_node(self._run_dir)
        refuse_other_owner() if job is None else make()
        super().__init__("memory", MemoryStore(self.root), every)
        self._rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        self._world, here = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # Rounded up, because the last machine may have spare ranks.
        self.machine, self.machines = self._rank // here, -(-self._world // here)
        self.leads = local == 0  # whether this is the first rank of its machine
        self.scope = str(self.machine)
        self.notes: list[str] = []
        self._buffers: list[Staging] = []
        self._holds: dict[Staging, CheckpointId] = {}  # buffer -> checkpoint whose file it is, oldest first
        self._own: list[CheckpointId] = []  # checkpoints saved by these workers, oldest first
        self._found: set[CheckpointId] | None = None  # complete checkpoints of earlier workers; None: used by a tool
        self._copies = Copies(())  # copies of this rank's files on other nodes
        self._copied: set[CheckpointId] = set()
        if job is not None:
            self._begin(Agreement(job, "memory", self._rank, self._world), copies)

    def _begin(self, agreement: Agreement, copies: int) -> None:
        """Find the checkpoints of earlier workers on all nodes; delete local files that cannot be loaded."""
        node = name_of_this_node()
        if self.leads:
            agreement.publish(f"node {self.machine}", node)
            agreement.publish(f"held {self.machine}", self.store.here.list_sizes())
            if self.machine == 0:
                agreement.publish(
                    "found",
                    [[str(one.id), one.write_id, one.nodes, one.sizes] for one in self._survey(agreement, node)],
                )
        survivors = [Survivor(_parse_id(text), *more) for text, *more in agreement.wait_for("found")]
        self._found = {one.id for one in survivors}
        if self.leads:
            self._clean(survivors)
            agreement.publish(f"clean {self.machine}", True)
        agreement.wait_for(f"clean {self.machine}")  # else `_clean` might delete the first buffer of a rank
        for one in survivors:
            for path, held_by in one.nodes.items():
                if held_by != node:
                    self.store.elsewhere[path] = Peer(self._run_dir, held_by), one.sizes[path]
        nearest = [(self.machine + 1 + number) % self.machines for number in range(min(copies, self.machines - 1))]
        self._copies = Copies([Peer(self._run_dir, agreement.wait_for(f"node {machine}")) for machine in nearest])
        self.beside = str(nearest[0]) if nearest else ""  # a lost node must not have the only zarr.json
        if len(nearest) < copies and self._rank == 0:
            there = f"the job has {self.machines} node{'s' if self.machines > 1 else ''}"
            self.notes.append(f"checkpoint.memory_copies={copies} needs {copies + 1} nodes, and {there}")

    def _survey(self, agreement: Agreement, node: str) -> list[Survivor]:
        """Return the checkpoints that can be loaded. Called on rank 0. Raises UserError if two nodes have equal names.

        Returns [] if the run has not begun: files in the directory belong to an earlier run with the same path.
        """
        names = [agreement.wait_for(f"node {machine}") for machine in range(self.machines)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(
                f"several nodes of this job have the name {min(twice)}, and so share one memory tier.",
                "The name of a node is GANGLINE_NODE if set, else its host name.",
                "Set another GANGLINE_NODE on each node, or checkpoint.memory_every=null.",
            )
        if not attempts.read(self._run_dir):
            return []
        node_files = {name: agreement.wait_for(f"held {machine}") for machine, name in enumerate(names)}
        others = [name for name in list_announced(self._run_dir) if name not in node_files]

        def read(name: str, path: str) -> bytes:
            return self.store.read(path) if name == node else Peer(self._run_dir, name).read(path)

        survivors, reasons = find_survivors({**node_files, **ask_peers(self._run_dir, others)}, read)
        self.notes += [f"checkpoint {id} in {self.root} cannot be loaded: {why}" for id, why in reasons.items()]
        return survivors

    def _clean(self, found: Collection[Survivor]) -> None:
        """Delete local files that belong to no checkpoint in `found`, or to another save of such a checkpoint."""
        counts = {str(one.id): one for one in found}
        for name in self.store.names():
            if name not in counts:
                shutil.rmtree(self.root / name, ignore_errors=True)
        for name, one in counts.items():
            for path, size in self.store.here.list_sizes(name).items():
                if one.sizes.get(f"{name}/{path}") != size or (path == NAME and not self._is(one)):
                    (self.root / name / path).unlink(missing_ok=True)

    def _is(self, one: Survivor) -> bool:
        try:
            return self.read_meta(one.id).write_id == one.write_id
        except (BadCheckpoint, OSError):
            return False

    def list_ids(self) -> list[CheckpointId]:
        """Return the checkpoints of earlier workers that can be loaded, and the checkpoints of these workers."""
        there = super().list_ids()
        if self._found is None:
            return there
        far = {id for id in self._found if f"{id}/{NAME}" in self.store.elsewhere}
        return sorted(far | {id for id in there if id in self._found or id in self._own})

    def read_trouble(self) -> str:
        """Return the message of this node's keeper about a failure, "" if none; it may start after the ranks."""
        try:
            return (self.root / TROUBLE).read_text()
        except OSError:
            return ""

    def explain_no_room(self, why: str, size: int) -> str:
        """Return the message about a buffer of `size` bytes that could not be allocated, with the free space."""
        try:
            disk = os.statvfs(ROOT)
            why += f"; {disk.f_bavail * disk.f_frsize:,} of {disk.f_blocks * disk.f_frsize:,} bytes are free"
        except OSError:
            pass
        return f"{ROOT} on {name_of_this_node()} cannot hold {size:,} bytes more: {why}"

    def commits(self, rank: int) -> bool:
        """Return whether this is the first rank of its machine."""
        return self.leads

    def get_target(self, path: str) -> None:
        """Return None: a buffer on tmpfs becomes the file."""

    def clear(self) -> None:
        """Delete nothing: a directory without zarr.json may contain a buffer that its rank will reuse."""

    def get_buffer(self, rank: int) -> Staging:
        """Return the buffer for the next save, never the buffer with the newest checkpoint. Raises OSError."""
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
        self._buffers.remove(buffer)  # /dev/shm was cleaned up, as some systems do when a user logs out
        buffer.close()
        return self.get_buffer(rank)

    def _make_room(self) -> None:
        """Delete all checkpoints of earlier workers except the newest complete one.

        The memory may be too small for two checkpoints and a new buffer.
        """
        if self.leads:
            newest = next(
                (id for id in attempts.branch(self._run_dir, self.list_ids()) if not self.find_checkpoint_error(id)),
                None,
            )
            for id in self._found or ():
                if id != newest:
                    self.store.delete(str(id))

    def _take_back(self, buffer: Staging) -> None:
        """Free a buffer for reuse: first delete zarr.json, which removes its checkpoint, and then rename the file."""
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
        """Rename the sealed buffer to the file of the checkpoint. Raises OSError."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.rename(staging.path, place)
        staging.path = str(place)
        self._holds[staging] = id

    def copy(self, id: CheckpointId, path: str, seconds: float, waiting: Callable[[], None]) -> str:
        """Copy this rank's file to the next nodes. Return why the copy failed, "" on success."""
        self._copied = {id}
        return self._copies.put(path, self.root / path, seconds, waiting)

    def abandon(self, id: CheckpointId, path: str) -> None:
        """Free the buffer of a failed save for reuse, and delete the copies of its file on other nodes."""
        if id in self._copied:
            self._copies.drop(path)
        for buffer in [one for one, held_id in self._holds.items() if held_id == id]:
            self._take_back(buffer)

    def mark_saved(self, id: CheckpointId) -> None:
        super().mark_saved(id)
        self._own = [*self._own[-1:], id]

    def prune(self, run_dir: str, kept: Collection[CheckpointId]) -> None:
        """Delete the checkpoints of earlier workers. Later saves overwrite the checkpoints of the present workers."""
        for id in self._found or ():
            self.store.delete(str(id))

    def close(self) -> None:
        """Close the buffers; the files stay."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers, self._holds = [], {}


def _parse_id(text: str) -> CheckpointId:
    id = CheckpointId.parse(text)
    assert id is not None, text
    return id
