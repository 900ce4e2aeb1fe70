"""One save as data: its content, its tiers and its deadline."""

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
    """One save, as every rank knows it.

    `tiers`: all tiers of the run, nearest first. `wanted`: the tiers to save to, as rank 0 decides. `disk`: the tier
    that a copy to the durable tier reads. `again`: whether a tier that already has the checkpoint counts as saved;
    otherwise it is an error.
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
    deadline_seconds: float  # maximum seconds for which a request is retried if a store fails or does not answer
    again: bool = False

    @property
    def copied(self) -> bool:
        """Return whether a copy to the durable tier follows."""
        return self.durable in self.wanted

    def get_rank_file(self, rank: int) -> RankFile:
        """Return the file that a rank writes."""
        return self.files.get_rank_file(rank)

    def get_file_path(self, write_id: str, rank: int) -> str:
        """Return the path of a rank's file in a store."""
        return f"{self.id}/{get_data_path(write_id, rank)}"

    def encode_metadata(self, write_id: str) -> bytes:
        """Return the content of zarr.json. Raises ValueError if it could not be read back."""
        return packed.write(self.registry, self.files, self.document, write_id)
