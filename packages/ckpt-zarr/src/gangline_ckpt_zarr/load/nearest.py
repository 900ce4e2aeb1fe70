"""Reads of each file from the nearest tier that has a good copy. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gangline import BadCheckpoint, UserError
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.load.read_plan import ReadItem, Target, plan_reads
from gangline_ckpt_zarr.load.reader import ChunkReader
from gangline_ckpt_zarr.stores.base import StoreError
from gangline_ckpt_zarr.tiers.base import Tier

_NO_DAMAGE = (StoreError, PermissionError, ConnectionError, TimeoutError)  # causes of a failed read other than damage


def fill_from_nearest(
    id: CheckpointId, copies: Sequence[tuple[Tier, Meta]], targets: Iterable[Target], verify: bool = True
) -> dict[int, str]:
    """Fill the targets. Return a line for each file that had to be read from a farther tier, by the file's rank.

    All copies must be of one save. If no tier has a good copy of a file, raises UserError if the store of any tier does
    not answer, else the BadCheckpoint of the nearest tier.
    """
    plan = plan_reads(copies[0][1], targets)
    lines = {rank: _read_nearest(id, copies, rank, items, verify) for rank, items in plan.items()}
    return {rank: line for rank, line in lines.items() if line}


def _read_nearest(
    id: CheckpointId, copies: Sequence[tuple[Tier, Meta]], rank: int, items: list[ReadItem], verify: bool
) -> str:
    bad: list[BadCheckpoint] = []
    for tier, meta in copies:
        reader = ChunkReader(meta, tier.get_file_path(id, meta, rank), tier.store, verify)
        try:
            reader.read(items)
            return f"{bad[0]}; loading the copy in {tier.store.url} instead" if bad else ""
        except BadCheckpoint as damage:
            bad.append(damage)
    silent = next((one for one in bad if isinstance(one.__cause__, _NO_DAMAGE)), None)
    if silent is not None:  # the store failed, not the checkpoint: falling back to an older checkpoint would lose work
        raise make_unreadable_error(f"checkpoint {id}", silent.why)
    raise bad[0]


def make_unreadable_error(what: str, why: str) -> UserError:
    """Return the error for a store that does not answer: the run stops, without an older checkpoint or a restart."""
    return UserError(
        f"{what} cannot be read: {why}.", "The run is unchanged. Fix the cause, then:  train resume=RUN_DIR"
    )
