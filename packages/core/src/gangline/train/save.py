"""Saves in the training loop: a save begins when the previous one is visible; a failed save does not end the run."""

from __future__ import annotations

import time
from concurrent.futures import Future

import torch
import torch.distributed as dist

from gangline.checkpoint.base import SaveFailed, SaveHandle, SaveRequest
from gangline.checkpoint.id import CheckpointId
from gangline.comm.objects import gather_json
from gangline.errors import UserError
from gangline.launch.signals import is_watched
from gangline.train.agree import check_all_true
from gangline.train.callbacks import call_each
from gangline.train.restore import capture
from gangline.train.session import Session

NOT_FINITE = "the weights are not finite"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01  # seconds between two polls of a save
_PATIENCE = 60.0  # seconds of waiting for a save before a note to the user; doubled after each note


def make_request(s: Session, request: SaveRequest | None, stops: bool) -> SaveRequest:
    """Return this rank's request for a save that all ranks begin now. request: from this rank's checkpointer, or None.

    stops: whether a signal ends the run; the deadline is then the earlier of the launcher's and the scheduler's kill.
    """
    if stops:
        bounds = [s.run.launch.get_seconds_to_stop() if is_watched() else None, s.run.launch.signal_seconds]
        deadline = min((bound for bound in bounds if bound is not None), default=None)
        return SaveRequest(s.step, last=True, deadline_seconds=deadline)
    return request or SaveRequest(s.step)


def find_lost_directory(s: Session) -> UserError | None:
    """Return the error for a run directory that was deleted or moved during the run; None if it exists."""
    if s.directory.config.exists():
        return None
    return UserError(
        f"{s.directory.config} is missing: the run directory was deleted or moved during the run.",
        "Earlier metrics and logs are lost, and new checkpoints cannot be resumed without config.yaml.",
        f"Restore config.yaml and parts.json from a copy, then:  train resume={s.directory.path}",
    )


def save(s: Session, request: SaveRequest) -> None:
    """Begin a save; a failure becomes a note. The previous save must be visible on all ranks: see `settle`.

    Raises TypeError if the checkpointer does not return a `SaveHandle`.
    """
    if s.comms.rank == 0 and (directory_error := find_lost_directory(s)):
        s.reporter.note(str(directory_error))
    s.newest = None
    call_each(s, "before_save", s.step)
    if bad := find_nonfinite_weights(s):
        s.bad_weights = f"{NOT_FINITE} ({bad})"
        failure = SaveFailed(CheckpointId(s.step, s.attempt), s.bad_weights)
        s.newest = SaveHandle(failure.id).finish(failure)
    else:
        try:
            with s.enter_phase("save"):
                shards = [shard for shard in s.shards() if shard.name not in s.base.left_out]
                s.newest = s.checkpointer.save(request, shards, s.saved_registry, capture(s).to_dict())
            if not isinstance(s.newest, SaveHandle):
                what = f"{type(s.checkpointer).__name__}.save returned {type(s.newest).__name__}, not a SaveHandle"
                raise TypeError(what)
        except SaveFailed as error:
            s.newest = SaveHandle(error.id).finish(error)
        else:
            call_each(s, "after_save", s.newest.id)
    s.settling.append(s.newest)


def find_nonfinite_weights(s: Session) -> str:
    """Return the rank and name of a trained weight with nan or inf, or ""; equal on every rank."""
    trained_names = {piece.shard.name for parameter in s.runtime.parameters() for piece in parameter.pieces}
    shards = [shard for shard in s.runtime.shards() if shard.name in trained_names and shard.local.numel()]
    # aminmax propagates nan, and takes a tenth of the time of an infinity norm.
    ends = [torch.stack(torch.aminmax(shard.local.detach())).to(s.device) for shard in shards]
    finite = torch.stack(ends).isfinite().all(1) if ends else torch.ones(1, device=s.device)
    bad = [shard.name for shard, good in zip(shards, finite.tolist(), strict=False) if not good][:1]
    everyone = gather_json(s.comms.world, bad)
    return next((f"rank {rank}: {names[0]}" for rank, names in enumerate(everyone) if names), "")


def settle(s: Session, every_tier: bool = False) -> None:
    """Wait, with all other ranks, until the newest save is visible; every_tier: until every save is settled.

    Ranks poll by a collective, which fails if a rank is lost; a wait through the job's store would not fail.
    """
    saves = [*s.settling] if every_tier else [save for save in [s.newest] if save is not None]
    pause, began, patience = _SHORTEST_PAUSE, time.monotonic(), _PATIENCE
    while True:
        saves = [save for save in saves if not is_over(save, every_tier)]
        if check_all_true(s.comms.world, not saves):
            break
        if time.monotonic() - began > patience:
            which = ", ".join(f"{save.id} ({save.progress:.0%} written here)" for save in saves) or "other ranks' saves"
            s.reporter.note(f"still waiting for {which} after {patience:.0f} s")
            patience *= 2
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE)
    poll(s)
    if every_tier and s.newest is not None:  # two saves may have ended in different orders on ranks
        s.failed_save = explain_failure(s.newest)


def is_over(save: SaveHandle, every_tier: bool) -> bool:
    """Return whether a save has failed, or is visible; every_tier: whether it has failed, or is settled."""
    return save.error is not None or (save.settled if every_tier else save.visible).done()


def poll(s: Session) -> None:
    """Record the outcome of saves that have ended."""
    visible = s.newest is not None and s.newest.visible.done() and not has_error(s.newest.visible)
    if s.newest is not None and visible and s.saved != str(s.newest.id):
        s.saved = s.fresh = str(s.newest.id)
    for save in [save for save in s.settling if is_over(save, every_tier=True)]:
        s.settling.remove(save)
        s.failed_save = None
        if save.error:
            give_up(s, save.error)


def has_error(future: Future[None]) -> bool:
    """Return whether a completed future was cancelled or has an exception."""
    return future.cancelled() or future.exception() is not None


def explain_failure(save: SaveHandle) -> str | None:
    """Return why a save failed; None if it has not failed."""
    return None if save.error is None else save.error.why


def tell(s: Session) -> None:
    """Report all pending notes to the user."""
    trouble, s.events.trouble = s.events.trouble, ""
    for note in (*s.notes, *s.checkpointer.take_notices(), *filter(None, [trouble])):
        s.reporter.note(note)
    s.notes.clear()


def explain_cut_off(s: Session) -> str:
    """Return why this rank can never reach the job's store again, or "": torch's client connects only once."""
    try:
        if s.comms.store is not None:
            s.comms.store.check(["gangline/reached"])
    except dist.DistError as error:
        return str(error).partition("\n")[0]
    except ConnectionError:  # another store, which may come back
        pass
    return ""


def give_up(s: Session, error: SaveFailed) -> None:
    """Report a failed save to the user and store the failure; training continues, and the end of the run checks it."""
    s.failed_save = error.why
    s.cut_off = s.cut_off or explain_cut_off(s)
    goes_on = ", and training continues" if s.step < s.run.steps else ""
    s.reporter.note(f"{error}; earlier checkpoints are not affected{goes_on}")
