"""One save as data: what is kept, in which tiers, by when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gangline.checkpoint.id import CheckpointId
from gangline.shard import Registry
from gangline_ckpt_zarr.format import packed
from gangline_ckpt_zarr.format.chunks import RankFile
from gangline_ckpt_zarr.format.packed import PackedFiles, get_data_path
from gangline_ckpt_zarr.notes import Notes
from gangline_ckpt_zarr.tiers.base import Tier


@dataclass(frozen=True)
class SaveTask:
    """What every rank knows of a save.

    `tiers` are the run's, nearest first; `wanted` those that it goes to, of which rank 0's list counts. `disk` is the
    tier that a copy to the durable one is read from. `again`: a tier that has it already is no error but
    done.
    """

    id: CheckpointId
    run_dir: str
    tiers: Sequence[Tier]
    wanted: Sequence[Tier]
    disk: Tier
    durable: Tier | None
    registry: Registry
    files: PackedFiles
    document: dict[str, Any]
    notes: Notes
    deadline_seconds: float  # how long a store may fail or stay silent
    again: bool = False

    @property
    def copied(self) -> bool:
        """Whether a copy to the durable tier follows."""
        return self.durable in self.wanted

    def get_rank_file(self, rank: int) -> RankFile:
        """What a rank writes."""
        return self.files.get_rank_file(rank)

    def get_file_path(self, write_id: str, rank: int) -> str:
        """Where in a store a rank's file lies."""
        return f"{self.id}/{get_data_path(write_id, rank)}"

    def encode_metadata(self, write_id: str) -> bytes:
        """The content of zarr.json. Raises ValueError where it would not be read again."""
        return packed.write(self.registry, self.files, self.document, write_id)
