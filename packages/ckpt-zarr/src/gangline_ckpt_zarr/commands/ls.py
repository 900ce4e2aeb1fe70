"""`gangline ckpt ls`: list the checkpoints of a run, in all its tiers."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence

from gangline import UserError
from gangline.checkpoint.id import CheckpointId
from gangline.cli import make_notes
from gangline.run import attempts
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.listing import ListedCheckpoint, list_checkpoints
from gangline_ckpt_zarr.commands.where import Place, find_place, make_parser
from gangline_ckpt_zarr.tiers.keeper import find_abandoned, run_of

NOTED_BYTES = 1e9  # minimum size in bytes of a killed run's memory tier that the listing of another run reports

Copies = dict[str, tuple[ListedCheckpoint, str]]  # tier -> (checkpoint, its state)


def run(argv: Sequence[str]) -> int:
    """Print the table of checkpoints; return 1 if any checkpoint is damaged. Raises UserError."""
    words = make_parser("ls", "List checkpoints: step, size, age, tiers, state. Reads each zarr.json, but no arrays.")
    words.add_argument("place", metavar="RUN_DIR", help="run directory, or a directory or URL of checkpoints")
    options = words.parse_args(list(argv))
    place = find_place([options.place])
    if place.alone is not None:
        raise UserError(
            f"{options.place} is a single checkpoint.", f"To show its content:  gangline ckpt show {options.place}"
        )
    _note_abandoned(place.run_dir)
    place = place.select_tier(options.tier)
    checkpoints: dict[CheckpointId, Copies] = {}
    for tier in place.tiers:
        for entry in list_checkpoints(tier.store):
            checkpoints.setdefault(entry.id, {})[tier.name] = entry, entry.state(tier)
    if not checkpoints:
        print(f"no checkpoints found in {options.place}.")
        return 0
    print(_format_checkpoints(place, checkpoints))
    damaged = [
        f"{text.place(tier.store.url)}/{id}: {checkpoints[id][tier.name][1]}"
        for tier in place.tiers
        for id in sorted(checkpoints)
        if tier.name in checkpoints[id] and checkpoints[id][tier.name][1].startswith("damaged")
    ]
    for line in damaged:
        print(line)
    return 1 if damaged else 0


def _note_abandoned(run_dir: str | None) -> None:
    """Print on stderr the size of the memory tiers of killed runs on this machine, and how to free the memory."""
    note = make_notes("gangline ckpt ls")
    for path in find_abandoned(run_dir):
        nbytes = 0
        with contextlib.suppress(OSError):  # another process has just removed the memory tier
            nbytes = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        if nbytes < NOTED_BYTES:
            continue
        run = run_of(path)
        of = f"the killed run {run}, which train resume={shlex.quote(run)} can continue" if run else "a killed run"
        note(
            f"{text.size(nbytes)} of memory hold checkpoints of {of}.\n"
            f"  To free the memory:  rm -r {shlex.quote(str(path))}"
        )


def _format_checkpoints(place: Place, found: dict[CheckpointId, Copies]) -> str:
    whole = [id for id, copies in found.items() if any(state == "complete" for _, state in copies.values())]
    branch = set(attempts.branch(place.run_dir, whole)) if place.run_dir else set(whole)
    newest, now = place.find_newest(whole), time.time()
    rows = []
    for id, copies in sorted(found.items()):
        checkpoint, state = next(
            (copy for copy in copies.values() if copy[1] == "complete"), next(iter(copies.values()))
        )
        state = state.partition(":")[0]
        tiers = [
            tier if copy_state == "complete" else f"{tier} ({copy_state.partition(':')[0]})"
            for tier, (_, copy_state) in copies.items()
        ]
        if state == "complete" and id not in branch:
            state = "abandoned"
        rows.append(
            (
                str(id.step),
                str(id),
                text.size(checkpoint.nbytes),
                "" if checkpoint.modified is None else text.format_age(now - checkpoint.modified),
                ", ".join(tiers) if id in whole else ", ".join(copies),
                f"{state}, newest" if id == newest else state,
            )
        )
    nbytes = sum(entry.nbytes for copies in found.values() for entry, _ in copies.values())
    table = text.format_table(("step", "id", "size", "age", "tiers", "state"), rows, right="step size age")
    return f"{table}\n{text.format_count(len(rows), 'checkpoint')}, {text.size(nbytes)} in all tiers"
