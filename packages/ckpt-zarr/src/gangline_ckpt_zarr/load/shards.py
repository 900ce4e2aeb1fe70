"""Loading of shards in any layout, from a checkpoint that was saved in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from gangline import BadCheckpoint, UserError
from gangline.checkpoint.id import CheckpointId
from gangline.shard import Registry, Shard
from gangline_ckpt_zarr.agreement import Agreement, Failed
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.load.host_buffer import GROUP_BYTES, HostBuffer
from gangline_ckpt_zarr.load.nearest import fill_from_nearest
from gangline_ckpt_zarr.load.shared import SharedLoad, agree_to_share
from gangline_ckpt_zarr.tiers.base import Tier


def load(
    id: CheckpointId,
    copies: Sequence[tuple[Tier, Meta]],
    shards: list[Shard],
    registry: Registry | None,
    agreement: Agreement,
    verify: bool = True,
) -> list[str]:
    """Fill the shards in place; an error on any rank is raised on all ranks.

    `registry`: registry of this run; ranks that hold equal boxes use it to share the reads of a remote store. None if
    every store is local.

    Returns notes about damaged copies that were skipped; [] on ranks other than 0. Raises UserError for a missing
    array, another shape or kind of dtype, or a store that does not answer; BadCheckpoint if no tier has a good copy.
    """
    try:
        copies = _select_one_save(copies, agreement)
        _check(id, copies[0][1], shards)
        meta = copies[0][1]
        shards = [shard for shard in shards if prod(shard.local.shape)]
        boxes, far = {(shard.name, shard.box) for shard in shards}, not copies[0][0].store.local
        if registry is not None and agree_to_share(agreement, registry, boxes, far):
            with HostBuffer(shards, meta, limit=None).open_groups() as groups:
                for group in groups:
                    sharing = SharedLoad(meta, registry, agreement.rank, group.targets)
                    _finish_reads(agreement, fill_from_nearest(id, copies, sharing.list_targets(), verify))
                    sharing.exchange()
                    group.copy()
        else:
            notes: dict[int, str] = {}
            with HostBuffer(shards, meta, GROUP_BYTES).open_groups() as groups:
                for group in groups:
                    notes |= fill_from_nearest(id, copies, group.targets, verify)
                    group.copy()
            _finish_reads(agreement, notes)
        return _report_passed_over(id, agreement) if agreement.rank == 0 else []
    except UserError as error:
        agreement.fail({"user": [error.what, *error.details]})
        raise
    except BadCheckpoint as bad:
        agreement.fail({"bad": [bad.array, bad.box, bad.file, bad.why]})
        raise
    except Failed as failure:
        if "user" in failure.what:
            raise UserError(*failure.what["user"]) from None
        array, box, file, why = failure.what["bad"]
        limits = None if box is None else tuple((start, stop) for start, stop in box)
        raise BadCheckpoint(array, limits, file, why) from None


def _select_one_save(copies: Sequence[tuple[Tier, Meta]], agreement: Agreement) -> Sequence[tuple[Tier, Meta]]:
    """Return the copies of the save in rank 0's nearest tier: two saves of one step may differ in bits."""
    if agreement.rank == 0:
        agreement.publish("save", copies[0][1].write_id)
    write_id = agreement.wait_for("save")
    save_copies = [(tier, meta) for tier, meta in copies if meta.write_id == write_id]
    if not save_copies:
        raise BadCheckpoint("every array", None, copies[0][0].store.url, "this rank and rank 0 read different saves")
    return [(tier, meta) for tier, meta in save_copies if meta.registry == save_copies[0][1].registry]


def _finish_reads(agreement: Agreement, notes: dict[int, str]) -> None:
    """Wait until all ranks have read; `notes`: a line for each file whose nearest copy is damaged, by its rank."""
    if notes and agreement.count("passed over", len(notes)) == len(notes):
        agreement.publish("first passed over", next(iter(notes.values())))
    agreement.count("read", 1)
    agreement.wait_for_all("read")


def _report_passed_over(id: CheckpointId, agreement: Agreement) -> list[str]:
    number = agreement.count("passed over", 0)
    if not number:
        return []
    return [f"{agreement.wait_for('first passed over')} ({number} damaged file{'s' * (number > 1)} of checkpoint {id})"]


def _check(id: CheckpointId, meta: Meta, shards: list[Shard]) -> None:
    missing = [shard.name for shard in shards if shard.name not in meta.registry]
    if missing:
        more = f" and {len(missing) - 3} more arrays." if len(missing) > 3 else "."
        names = list(meta.registry)
        raise UserError(
            f"arrays missing in checkpoint {id}: {', '.join(missing[:3])}{more}",
            f"The checkpoint contains {len(names)} arrays: {', '.join(names[:3])}, ...",
        )
    for shard in shards:
        layout = meta.registry[shard.name]
        if layout.shape != tuple(shard.global_shape):
            here = tuple(shard.global_shape)
            raise UserError(f"{shard.name} has shape {layout.shape} in checkpoint {id}, and {here} in this run.")
        stored_dtype = getattr(torch, layout.dtype)
        if stored_dtype != shard.dtype and not (stored_dtype.is_floating_point and shard.dtype.is_floating_point):
            raise UserError(f"{shard.name} is {layout.dtype} in checkpoint {id}, and {shard.dtype} in this run.")
