"""Checkpoints from the loop's side: one save is in flight at a time, and one that comes to nothing ends no run."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from gangline.checkpoint.base import SaveFailed, SaveRequest
from gangline.checkpoint.id import CheckpointId
from gangline.comm.objects import gather_json
from gangline.errors import UserError
from gangline.launch.signals import watched
from gangline.train.agree import all_true
from gangline.train.callbacks import each
from gangline.train.restore import capture
from gangline.train.session import Session

NOT_FINITE = "the weights are not finite"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01  # seconds between two looks at a save


def asked(s: Session, mine: SaveRequest | None, stops: bool) -> SaveRequest:
    """What this rank asks of a save that all ranks begin now; `mine`: what its checkpointer asked for.

    `stops`: a signal ends the run; a rank is killed when its launcher or the scheduler has waited long enough.
    """
    if stops:
        bounds = [s.run.launch.seconds_to_stop() if watched() else None, s.run.launch.signal_seconds]
        deadline = min((bound for bound in bounds if bound is not None), default=None)
        return SaveRequest(s.step, last=True, deadline_seconds=deadline)
    return mine or SaveRequest(s.step)


def lost_directory(s: Session) -> UserError | None:
    """Return the error of a run whose directory was deleted while it trains, None where it is there."""
    if s.directory.config.exists():
        return None
    return UserError(
        f"{s.directory.config} is gone: the run directory was deleted or moved while the run was at it.",
        "Metrics and logs up to then are lost, and what is saved there now cannot be resumed without config.yaml.",
        f"Put config.yaml and parts.json back from a copy, then:  train resume={s.directory.path}",
    )


def save(s: Session, request: SaveRequest) -> None:
    """Begin a checkpoint, once the one before it has been settled; one that fails leaves a note."""
    poll(s, wait=True)
    if s.comms.rank == 0 and (lost := lost_directory(s)):
        s.reporter.note(str(lost))
    each(s, "before_save", s.step)
    if bad := nonfinite_weights(s):
        s.bad_weights = f"{NOT_FINITE} ({bad})"
        give_up(s, SaveFailed(CheckpointId(s.step, s.attempt), s.bad_weights))
        return
    try:
        with s.phase("save"):
            shards = [shard for shard in s.shards() if shard.name not in s.left_out]
            s.saving = s.checkpointer.save(request, shards, s.saved_registry, capture(s).to_dict())
    except SaveFailed as error:
        give_up(s, error)
        return
    each(s, "after_save", s.saving.id)


def nonfinite_weights(s: Session) -> str:
    """Return the rank and the name of trained weights with a NaN or an infinity, or "": the same on every rank."""
    trained = {piece.shard.name for parameter in s.runtime.parameters() for piece in parameter.pieces}
    mine = [shard for shard in s.runtime.shards() if shard.name in trained and shard.local.numel()]
    # A NaN is its own least and largest value; to read both takes a tenth of the time of an infinity norm.
    ends = [torch.stack(torch.aminmax(shard.local.detach())).to(s.device) for shard in mine]
    finite = torch.stack(ends).isfinite().all(1) if ends else torch.ones(1, device=s.device)
    flag = (~finite.bool()).any().to(torch.float64).reshape(1)
    s.comms.world.all_reduce(flag, op="max")
    if not float(flag):
        return ""
    bad = [shard.name for shard, good in zip(mine, finite.tolist(), strict=False) if not good][:1]
    everyone = gather_json(s.comms.world, s.device, bad)
    return next(f"rank {rank}: {names[0]}" for rank, names in enumerate(everyone) if names)


def settle(s: Session) -> None:
    """Wait until the save in flight is over, with all other ranks.

    A rank waits for words of others there, and no store says that one of them is lost: a collective does, it fails.
    """
    pause = _SHORTEST_PAUSE
    while not all_true(s.comms.world, s.device, s.saving is None or s.saving.over):
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE)


def poll(s: Session, wait: bool = False) -> None:
    """Look after the save in flight."""
    if s.saving is None:
        return
    try:
        if wait:
            s.saving.wait()
        elif not s.saving.poll():
            return
        s.saved = s.fresh = str(s.saving.id)
        s.failed_save = None
    except SaveFailed as error:
        give_up(s, error)
    s.saving = None


def tell(s: Session) -> None:
    """Pass on what people should know."""
    trouble, s.events.trouble = s.events.trouble, ""
    for note in (*s.notes, *s.checkpointer.notices(), *filter(None, [trouble])):
        s.reporter.note(note)
    s.notes.clear()


def why_cut_off(s: Session) -> str:
    """Why this rank will never reach the job's store again, or "". torch's client connects once, and never anew."""
    try:
        if s.comms.store is not None:
            s.comms.store.check(["gangline/reached"])
    except dist.DistError as error:
        return str(error).partition("\n")[0]
    except ConnectionError:  # of another store: it may be back
        pass
    return ""


def give_up(s: Session, error: SaveFailed) -> None:
    """A save came to nothing: say so, once, and train on; the end of the run looks at it again."""
    s.failed_save = error.why
    s.cut_off = s.cut_off or why_cut_off(s)
    goes_on = ", and training goes on" if s.step < s.run.steps else ""
    s.reporter.note(f"{error}; what was saved before is untouched{goes_on}")
