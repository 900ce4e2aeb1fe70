"""`checkpoint=torch`: checkpoints by torch.distributed.checkpoint.

With a registry of one rank, no process group is used. Otherwise DCP uses torch.distributed's default process group to
gather the plans on rank 0 and to report an error of any rank on all ranks. Saves are synchronous.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from gangline.checkpoint.base import Checkpointer, SaveFailed, SaveHandle, SaveRequest
from gangline.checkpoint.id import CheckpointId
from gangline.checkpoint.retention import find_superfluous
from gangline.errors import UserError
from gangline_basics.checkpoint.planners import ShardLoadPlanner, ShardSavePlanner, get_arrays
from gangline_basics.checkpoint.storage import (
    CHECKSUMS,
    CONDEMNED,
    ChecksumFile,
    DcpReader,
    DcpWriter,
    explain_missing_files,
)

if TYPE_CHECKING:
    from gangline.comm.base import Store
    from gangline.config.schema import Run
    from gangline.shard import Registry, Shard
    from gangline_basics.checkpoint.config import TorchCheckpoint


class DcpCheckpointer(Checkpointer):
    """Checkpointer that stores checkpoints as directories `checkpoints/<id>` of a run directory."""

    def __init__(self, run_dir: str, keep_last: int | None = None) -> None:
        self._run_dir, self.keep_last = run_dir, keep_last
        self.directory = Path(run_dir) / "checkpoints"
        self._trusted: set[CheckpointId] = set()
        self._reader: DcpReader | None = None  # reader of the last requested checkpoint, until it is loaded

    @property
    def run_dir(self) -> str:
        return self._run_dir

    def save(
        self, request: SaveRequest, shards: Sequence[Shard], registry: Registry, document: dict[str, Any]
    ) -> SaveHandle:
        """Write a checkpoint, which is durable when `save` returns.

        Raises SaveFailed if the disk is full or unavailable, FileExistsError if the checkpoint exists.
        """
        start, id = time.perf_counter(), CheckpointId(request.step, document["attempt"])
        writer = DcpWriter(self.directory / str(id), document)
        planner = ShardSavePlanner(shards, registry)
        try:
            _call(dcp.save, registry, storage_writer=writer, planner=planner)
        except BaseException as error:
            if _coordinates(registry):
                rmtree(writer.path, ignore_errors=True)  # frees the space if the disk is full
            if isinstance(error, OSError) and not isinstance(error, FileExistsError):
                raise SaveFailed(id, f"{error.strerror or error} ({self.directory})") from error
            raise
        if _coordinates(registry):
            self._delete_old(id)
        return SaveHandle(id, time.perf_counter() - start).finish()

    def list(self):
        names = (path.parent.name for path in self.directory.glob(f"*/{CHECKSUMS}"))
        return sorted(id for name in names if (id := CheckpointId.parse(name)) is not None)

    def read_document(self, id: CheckpointId) -> dict[str, Any]:
        return ChecksumFile(self._make_path(id)).read_document()

    def read_shapes(self, id: CheckpointId) -> dict[str, tuple[int, ...]]:
        """Return the shape of each stored array, from DCP's own table. Raises BadCheckpoint."""
        reader = self._get_reader(id)
        arrays = get_arrays(reader.read_metadata())
        if reader.damage is not None:
            raise reader.damage
        return {name: tuple(array.size) for name, array in arrays.items()}

    def load(self, id: CheckpointId, shards: Iterable[Shard], registry: Registry) -> None:
        reader, self._reader = self._get_reader(id), None
        _call(dcp.load, registry, storage_reader=reader, planner=ShardLoadPlanner(shards, reader.directory))

    def _get_reader(self, id: CheckpointId) -> DcpReader:
        """Return a reader. It is cached, because reading a table of 10,000 chunks takes seconds."""
        path = self._make_path(id)
        if self._reader is None or self._reader.directory != path:
            self._reader = DcpReader(path)
        return self._reader

    def _make_path(self, id: CheckpointId) -> Path:
        path = self.directory / str(id)
        if not path.is_dir():
            ids = ", ".join(map(str, self.list())) or "none"
            raise UserError(f"checkpoint {id} does not exist in {self.directory}.", f"Existing checkpoints: {ids}.")
        return path

    def _delete_old(self, saved: CheckpointId) -> None:
        """Delete all checkpoints except `saved` and the newest `keep_last` complete ones of the current branch."""
        if self.keep_last is None:
            return
        self._trusted.add(saved)
        ids = find_superfluous(self.run_dir, self.list(), self.keep_last, self._explain_damage, {saved})
        for path in (self.directory / str(id) for id in ids):
            condemned = path.with_name(CONDEMNED + path.name)
            try:
                path.rename(condemned)  # invisible to readers at once, even if the deletion is interrupted
            except OSError as error:  # the new checkpoint is safe, so the run continues
                warnings.warn(f"the old checkpoint {path} could not be deleted: {error.strerror}", stacklevel=2)
            rmtree(condemned, ignore_errors=True)

    def _explain_damage(self, id: CheckpointId) -> str:
        """Return why a checkpoint is damaged, or ""; a checkpoint that this run has saved or verified is trusted."""
        if id not in self._trusted:
            if why := explain_missing_files(self.directory / str(id)):
                return why
            self._trusted.add(id)
        return ""


def build(config: TorchCheckpoint, run: Run, store: Store | None) -> DcpCheckpointer:
    """Return the checkpointer of the run's directory."""
    assert run.job.dir is not None, "the run directory must be set before the checkpointer is built"
    return DcpCheckpointer(run.job.dir, config.keep_last)


def _coordinates(registry: Registry) -> bool:
    return registry.mesh.world == 1 or dist.get_rank() == 0


def _call(function: Callable, registry: Registry, **arguments: Any) -> None:
    """Call into DCP; an error of any rank is raised on all ranks, as the original exception."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            function({}, no_dist=registry.mesh.world == 1, **arguments)
    except dcp.api.CheckpointException as error:  # DCP raises a BaseException, with a dict of causes by rank
        rank = min(error.failures)
        cause = error.failures[rank][0]
        if registry.mesh.world > 1:
            cause.add_note(f"raised on rank {rank}")
        raise cause from error
