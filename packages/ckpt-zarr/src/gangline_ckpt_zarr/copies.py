"""Read from the nearest tier that has a good copy of each file. Torch-free, so tools use it too."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from gangline.checkpoint.base import CheckpointId
from gangline.errors import BadCheckpoint
from gangline_ckpt_zarr.format.metadata import Meta
from gangline_ckpt_zarr.reading import Piece, Reader, Target, plan
from gangline_ckpt_zarr.tiers import Tier


def fill(id: CheckpointId, copies: Sequence[tuple[Tier, Meta]], targets: Iterable[Target], verify: bool = True) -> int:
    """Fill the targets; gives how many files had to be read from a farther tier.

    Raises BadCheckpoint, of the nearest tier, where a file is good in none.
    """
    meta = copies[0][1]
    alike = [(tier, own) for tier, own in copies if own.registry == meta.registry]
    return sum(_file(id, alike, rank, pieces, verify) for rank, pieces in plan(meta, targets).items())


def _file(id: CheckpointId, copies: Sequence[tuple[Tier, Meta]], rank: int, pieces: list[Piece], verify: bool) -> int:
    bad: BadCheckpoint | None = None
    for tier, meta in copies:
        if bad is not None:
            warnings.warn(f"{bad}; taking the copy in {tier.store.url}", stacklevel=2)
        reader = Reader(meta, tier.path(id, meta, rank), tier.store, verify)
        try:
            reader.read(pieces)
            return int(bad is not None)
        except BadCheckpoint as damage:
            bad = bad or damage
    assert bad is not None
    raise bad
