"""`gangline ckpt prune`: delete the checkpoints that retention does not keep, after reading the others."""

from __future__ import annotations

from collections.abc import Sequence

from gangline import UserError
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.listing import list_checkpoints
from gangline_ckpt_zarr.commands.verify import check_copy
from gangline_ckpt_zarr.commands.where import Copy, find_place, make_parser
from gangline_ckpt_zarr.stores.open import open_store
from gangline_ckpt_zarr.tiers.stored import StoreTier


def run(argv: Sequence[str]) -> int:
    """Delete checkpoints in each tier, print their ids; return 1 if a kept checkpoint is damaged. Raises UserError."""
    words = make_parser("prune", "Delete the checkpoints of a run, except the newest N and one per K steps.")
    words.add_argument("place", metavar="RUN_DIR", help="run directory")
    words.add_argument(
        "--keep-last",
        type=int,
        metavar="N",
        help="number of newest checkpoints to keep; default: as configured in the run",
    )
    words.add_argument(
        "--keep-every",
        type=int,
        metavar="K",
        help="steps between older checkpoints to keep; default: as configured in the run",
    )
    words.add_argument(
        "--dry-run", action="store_true", help="print the checkpoints that would be deleted, and delete none"
    )
    options = words.parse_args(list(argv))
    for flag, value in (("--keep-last", options.keep_last), ("--keep-every", options.keep_every)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: expected 1 or more.")
    place = find_place([options.place]).select_tier(options.tier)
    if place.run_dir is None:
        raise UserError(
            f"{options.place} is not a run directory.",
            "Only a run directory records which checkpoints a rollback abandoned (attempts.jsonl).",
        )
    # The memory tier is not pruned: it has two buffers per rank, which the job itself reuses.
    tiers = [tier for tier in place.tiers if tier.name != "memory"]
    for tier in tiers:
        tier.keep_last = options.keep_last or tier.keep_last
        tier.keep_every = options.keep_every or tier.keep_every
        if tier.keep_last is None:
            raise UserError(
                f"the number of checkpoints to keep in {tier.store.url} is not set.",
                f"gangline ckpt prune {options.place} --keep-last 3",
            )
    damaged = [_prune(tier, place.run_dir, options.dry_run) for tier in tiers]
    return 1 if any(damaged) else 0


def _prune(tier: StoreTier, run_dir: str, dry_run: bool) -> bool:
    """Prune one tier; return whether it has a damaged checkpoint that should be kept."""
    bad: dict[CheckpointId, str] = {}

    def find_copy_error(id: CheckpointId) -> str:
        """Read every byte of a checkpoint to keep; return why the checkpoint is damaged, "" if it is good."""
        store = open_store(f"{tier.store.url}/{id}")
        try:
            damage = check_copy(Copy(str(id), tier.name, store))[0]
        except (OSError, UserError) as error:
            bad[id] = str(error)
        else:
            bad.update({id: str(damage[0])} if damage else {})
        finally:
            store.close()
        return bad.get(id, "")

    ids = tier.list_ids()
    superfluous_ids = tier.list_superfluous(run_dir, find_copy_error)
    for id, why in bad.items():
        print(
            f"unreadable checkpoint {text.place(tier.store.url)}/{id} does not count as kept and is not deleted: {why}"
        )
    if bad and len(bad) == len(ids) - len(superfluous_ids):
        print(f"{tier.name}: every checkpoint to keep is unreadable, so no checkpoint is deleted")
        return True
    sizes = {entry.id: entry.nbytes for entry in list_checkpoints(tier.store)}
    verb = "would delete" if dry_run else "deleted"
    for id in superfluous_ids:
        if not dry_run:
            tier.store.delete(str(id))
        print(f"{verb} {text.place(tier.store.url)}/{id} ({text.size(sizes.get(id, 0))})")
    freed = text.size(sum(sizes.get(id, 0) for id in superfluous_ids))
    print(f"{tier.name}: {verb} {len(superfluous_ids)} of {text.format_count(len(ids), 'checkpoint')}, {freed}")
    return bool(bad)
