"""`gangline ckpt ls`: the checkpoints of a run, in all its tiers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gangline import attempts
from gangline.checkpoint.base import CheckpointId
from gangline.errors import UserError
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.listing import Entry, entries
from gangline_ckpt_zarr.commands.where import Place, one, parser

Copies = dict[str, Entry]  # by tier


def run(argv: Sequence[str]) -> int:
    """Print the table."""
    words = parser("ls", "List checkpoints: step, size, age, tiers, state.")
    words.add_argument("place", metavar="RUN_DIR", help="a run's directory, or a directory or URL of checkpoints")
    options = words.parse_args(list(argv))
    place = one([options.place])
    if place.alone is not None:
        raise UserError(
            f"{options.place} is one checkpoint.", f"gangline ckpt show {options.place}  tells what is in it."
        )
    place = place.only(options.tier)
    found: dict[CheckpointId, Copies] = {}
    for tier in place.tiers:
        for entry in entries(tier.store):
            found.setdefault(entry.id, {})[tier.name] = entry
    if not found:
        print(f"{options.place} has no checkpoints.")
        return 0
    print(_table(place, found))
    return 0


def _table(place: Place, found: dict[CheckpointId, Copies]) -> str:
    whole = [id for id, copies in found.items() if any(copy.whole for copy in copies.values())]
    branch = set(attempts.branch(place.run_dir, whole)) if place.run_dir else set(whole)
    newest, now = place.newest(whole), time.time()
    rows = []
    for id, copies in sorted(found.items()):
        shown = next((copy for copy in copies.values() if copy.whole), next(iter(copies.values())))
        held = [tier if copy.whole else f"{tier} (unfinished)" for tier, copy in copies.items()]
        state = "unfinished" if not shown.whole else "abandoned" if id not in branch else "whole"
        rows.append(
            (
                str(id.step),
                str(id),
                text.size(shown.nbytes),
                "" if shown.modified is None else text.age(now - shown.modified),
                ", ".join(held) if shown.whole else ", ".join(copies),
                f"{state}, newest" if id == newest else state,
            )
        )
    nbytes = sum(copy.nbytes for copies in found.values() for copy in copies.values())
    table = text.table(("step", "id", "size", "age", "tiers", "state"), rows, right="step size age")
    return f"{table}\n{text.many(len(rows), 'checkpoint')}, {text.size(nbytes)} in all tiers"
