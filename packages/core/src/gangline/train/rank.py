"""Main program of one rank: from a run directory to its exit code."""

from __future__ import annotations

import errno
import gc
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from gangline.checkpoint.base import SaveRequest, SaveState
from gangline.checkpoint.id import CheckpointId
from gangline.comm.base import Comms
from gangline.comm.transport import connect
from gangline.config.schema import Run
from gangline.data.base import DataSource
from gangline.errors import PeerFailed, UserError
from gangline.launch.errors import RestartWanted, is_lost_peer
from gangline.launch.output import log_path
from gangline.mesh import Mesh
from gangline.plugin import registry
from gangline.pulse.layout import NUMBER
from gangline.pulse.write import get_current
from gangline.run.directory import RunDirectory
from gangline.run.ending import EXIT_STOPPED, PREEMPTING, RunEnding, decide_ending, write_ending
from gangline.run.generation import hold, read_generation
from gangline.train.agree import gather_verdicts
from gangline.train.build import build, choose_device
from gangline.train.callbacks import call_each, tell_of_error
from gangline.train.determinism import use_deterministic_kernels
from gangline.train.left_behind import list_left_behind
from gangline.train.loop import run_steps
from gangline.train.responses import Ending
from gangline.train.save import NOT_FINITE, find_lost_directory, save, settle, tell
from gangline.train.session import Session
from gangline.train.unreported import flush, recover
from gangline.train.verdicts import cut_off

# Messages of the operating system for a save to a read-only store.
NOT_WRITABLE = tuple(map(os.strerror, (errno.EROFS, errno.EACCES, errno.EPERM)))

# Kinds of verdicts that a lower learning rate may avoid.
LOWER_RATE_HELPS = ("not-finite", "loss-spike", "gradient-spike", "divergence")


def train_rank(run_dir: str) -> int:
    """Train the run in `run_dir`; return the exit code. Called on every rank."""
    directory = RunDirectory.open(run_dir)
    run = directory.run()
    set_environment(run)
    device = choose_device(run)
    if run.deterministic:
        use_deterministic_kernels(device)
    mesh = Mesh.of(run.parallel.size_axes(int(os.environ.get("WORLD_SIZE", "1"))))
    comms = join_ranks(run, mesh, device)
    session = build(run, directory, mesh, comms, device)
    code = train(session)
    comms.close()  # not after a failure, because it would wait for dead peers before the error is reported
    shows = comms.rank == 0 and code == 0 and bool(session.saved) and run.job.sample
    show = registry.load_capability(run.data, "sample") if shows else None
    del session, comms  # free memory: the sample loads the complete model onto the device
    if show:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        show(run_dir, run.job.sample)
    return code


def set_environment(run: Run) -> None:
    """Set the environment variables that the run's parts need, except variables that the user has set.

    Called before the first tensor on a GPU, because the allocator of GPU memory reads its variable once.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less fragmentation
    for _, config in run.iterate_parts():
        for name, value in config.get_environment(run).items():
            os.environ.setdefault(name, value)


def join_ranks(run: Run, mesh: Mesh, device: torch.device) -> Comms:
    """Connect this rank to the other ranks; return the communicators, wrapped by the parts of the run."""
    limit = run.launch.timeout_seconds
    comms = connect(mesh, device=device, deterministic=run.deterministic, timeout=limit, pulse=get_current())
    for _, config in run.iterate_parts():
        comms = config.wrap(run, comms)
    return comms


def train(s: Session) -> int:
    """Run the loop, the final checkpoint and the summary; return the exit code."""
    began, first = time.time(), s.step
    if s.comms.rank == 0:
        s.directory.add_provenance("data", describe_provenance(s.source, s.cursor))
        sets = {name: describe_provenance(held_out.source) for name, held_out in s.validation_sets.items()}
        s.directory.add_provenance("validation_sets", sets)
        if s.validation is not None:
            s.directory.add_provenance("validation", describe_provenance(s.validation.source))
    s.reporter.describe["data"] = s.source.describe()
    s.reporter.begin(s.run, str(s.directory.path), s.step, s.attempt, s.mesh.world)
    with report_errors(s, began, first):
        if s.step >= s.run.steps and s.comms.rank == 0:
            what = f"train: the run has ended: step {s.step} is done, and run.steps={s.run.steps}."
            again = f"train resume={shlex.quote(str(s.directory.path))} run.steps={2 * s.step}"
            print(f"{what}\n  To continue:  {again}", file=sys.stderr, flush=True)
        recover(s)
        tell(s)
        try:
            with s.events.record_error():
                ending = run_loop(s, first)
        except BaseException as error:
            with suppress(Exception):  # the next start reports or repeats the step
                flush(s)
            tell_of_error(s, error)
            raise
        finally:
            s.close_readers()
        settle(s, every_tier=True)
        flush(s)
        if ending.why in ("done", *PREEMPTING) and (restart := find_lost_save(s)):
            ending = restart
        s.checkpointer.close()
        tell(s)
        if s.comms.rank == 0 and ending.why != "restart" and not describe_unsaved(s, ending):  # else the launcher
            with hold(s.directory.path):  # now: the launcher ends this rank soon after other ranks
                write_ending(s.directory.path, make_ending(s, ending))
    s.reporter.end(summarise(s, ending, time.time() - began, s.step - first))
    s.record_event("end", why=ending.why, evidence=ending.evidence)
    s.events.close()
    return exit_code(s, ending)


@contextmanager
def report_errors(s: Session, began: float, first: int) -> Iterator[None]:
    """End the trackers if an error leaves the block; they send their remaining records, within their timeouts."""
    try:
        yield
    except BaseException as error:
        ending = Ending("error", format_evidence(error, s))
        try:
            s.reporter.end(summarise(s, ending, time.time() - began, s.step - first))
        except BaseException as another:  # must not hide the first error
            error.add_note(f"the trackers failed to report this error: {type(another).__name__}: {another}")
        raise


def format_evidence(error: BaseException, s: Session) -> str:
    """Return an error in one line; the transport library's message about a lost peer is only in the log."""
    if is_lost_peer(error) and not isinstance(error, PeerFailed):
        return f"lost the connection to another rank (details: {log_path(s.directory.path / 'logs', s.comms.rank)})"
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def make_ending(s: Session, ending: Ending) -> RunEnding:
    """Return the ending of a run that is done, was stopped by a verdict, or was ended by a signal."""
    number = read_generation()
    if ending.why == "done":
        return decide_ending(number, f"step {s.step} is done", done=True)
    if ending.why == "stop":
        exclude = s.history[-1].exclude if s.history else ()
        return decide_ending(number, ending.evidence, failure="ended", exit_code=EXIT_STOPPED, exclude=exclude)
    checkpoint = CheckpointId.parse(s.saved) if s.saved else None
    evidence = f"{ending.why} at step {s.step}; newest checkpoint: {s.saved or 'none'}"
    return decide_ending(
        number, evidence, signal=ending.why, saved=checkpoint is not None and checkpoint.step == s.step
    )


def find_lost_save(s: Session) -> Ending | None:
    """Return a restart, equal on all ranks, if the last save failed because the store was lost; new ranks can save."""
    own_verdicts = [cut_off(s)] if s.failed_save and s.cut_off else []
    verdicts, _ = gather_verdicts(s.comms.world, own_verdicts)
    return Ending("restart", "; ".join(map(str, verdicts)), requeue=True) if verdicts else None


@contextmanager
def pause_collection(every: int | None) -> Iterator[None]:
    """Pause Python's automatic garbage collection in the block, unless `every` is None: the loop collects instead.

    A rank that collects alone makes all others wait. Objects from before the block are not scanned, which saves time.
    """
    if every is None:
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def run_loop(s: Session, first: int) -> Ending:
    """Run the loop, save the last checkpoint and call `end` of every callback; return how the run ends."""
    with pause_collection(s.run.job.gc_every):
        ending = run_steps(s)
    settle(s, every_tier=True)
    flush(s)
    get_current().enter(NUMBER["end"])  # "end" includes the last save
    keeps = s.run.checkpoint.at_end and s.checkpointer.keeps
    if ending.why == "done" and keeps and (s.step > first or is_fleeting(s)):
        save_at_end(s)
    call_each(s, "end", ending.why)
    return ending


def describe_provenance(source: DataSource, cursor: int = 0) -> dict[str, Any]:
    """Return the facts of a data source for provenance.json; they include the arguments of `DataSource.continues`."""
    about = {"fingerprint": source.compute_fingerprint(), "is": source.describe()}
    state = source.state(cursor)
    return about | ({"cursor": cursor, "state": state} if state else {})


def save_at_end(s: Session) -> None:
    """Save the last checkpoint in every tier, unless the last step saved a lasting checkpoint."""
    failed = s.newest is not None and s.newest.state is SaveState.FAILED
    if failed or s.saved != str(CheckpointId(s.step, s.attempt)) or is_fleeting(s):
        save(s, SaveRequest(s.step, last=True))


def is_fleeting(s: Session) -> bool:
    """Return whether the newest checkpoint is lost when the job ends."""
    id = CheckpointId.parse(s.saved) if s.saved else None
    return id is not None and not s.checkpointer.is_lasting(id)


def summarise(s: Session, ending: Ending, seconds: float, steps: int) -> dict:
    """Return the summary of the run that trackers get at the end."""
    return {
        "why": ending.why,
        "evidence": ending.evidence,
        "step": s.step,
        "steps": steps,
        "tokens": s.tokens,
        "seconds": seconds,
        "checkpoint": s.saved,
        "directory": str(s.directory.path),
        "failed_save": s.failed_save,
        "unigram_entropy": s.source.compute_unigram_entropy(),
        **list_left_behind(s, ending.why),
    }


def exit_code(s: Session, ending: Ending) -> int:
    """Return 0 if done, 3 if stopped by a verdict, 75 if saved and to be requeued, 128 + n for signal n.

    Raises RestartWanted if new workers are needed; without a restart left the launcher exits with 3, or with 75 if a
    requeue helps. Raises UserError if the last checkpoint could not be saved, or the run directory is missing.
    """
    if ending.why == "restart":
        raise RestartWanted(ending.evidence, requeue=ending.requeue)
    if why := describe_unsaved(s, ending):
        raise UserError(
            f"the last checkpoint could not be saved: {why}",
            f"The newest complete checkpoint is {s.saved}." if s.saved else "There is no earlier checkpoint.",
            f"{explain_remedy(why)}: train resume={shlex.quote(str(s.directory.path))}",
        )
    if s.comms.rank == 0 and (directory_error := find_lost_directory(s)):
        raise directory_error
    if ending.why == "stop" and s.comms.rank == 0:
        lines = ("train: the run stopped.", ending.evidence, *list_advice(s, ending))
        print("\n  ".join(lines), file=sys.stderr, flush=True)
    return make_ending(s, ending).exit_code


def explain_remedy(why: str) -> str:
    """Return the advice for a save that failed for this reason."""
    if why.startswith(NOT_FINITE):
        return "Continue from that checkpoint"
    return "Make the store writable, then" if any(word in why for word in NOT_WRITABLE) else "Fix the cause, then"


def describe_unsaved(s: Session, ending: Ending) -> str:
    """Return why the newest state is not saved; "" if it is saved or the run stopped for non-finite weights."""
    why = s.failed_save or ""
    return "" if ending.why == "stop" and why.startswith(NOT_FINITE) else why


def list_advice(s: Session, ending: Ending) -> list[str]:
    """Return commands to continue after a stop, without commands that the verdicts rule out."""
    directory, rate = shlex.quote(str(s.directory.path)), s.run.optimizer.learning_rate
    lines = []
    if any(kind in LOWER_RATE_HELPS for kind in ending.kinds):
        lines.append(f"To try half the learning rate:  train from={directory} optimizer.learning_rate={rate / 2:g}")
    checkpoint = CheckpointId.parse(s.saved) if s.saved else None
    if checkpoint is None:
        return lines
    if ending.first is None or checkpoint.step < ending.first:
        return [*lines, f"To continue from {checkpoint}:  train resume={directory}"]
    lines.append(f"Do not trust {checkpoint}: the fault may have begun at step {ending.first}.")
    return [*lines, f"To start from scratch:  train from={directory}"]
