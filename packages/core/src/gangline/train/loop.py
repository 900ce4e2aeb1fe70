"""The training loop: batch -> forward and backward -> clip -> optimizer -> health -> report -> checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gangline.checkpoint import CheckpointId, SaveFailed
from gangline.health import Action, Verdict, decide
from gangline.launch.signals import stop_requested
from gangline.record import StepRecord
from gangline.train.agree import agree
from gangline.train.callbacks import each
from gangline.train.report import Clock, peak_memory
from gangline.train.restore import capture, roll_back
from gangline.train.session import Session
from gangline.train.validate import validate


@dataclass(frozen=True)
class Ending:
    """How the loop ended: why is "done", a signal's name, "stop" or "restart"; evidence says more."""

    why: str
    evidence: str = ""


def loop(s: Session) -> Ending:
    """Run steps until the run is done, a signal came, or a verdict ends it."""
    for name, check in s.health.items():
        observe(s, name, check.before_run)
    each(s, "begin", s.step)
    s.checkpointer.prepare(s.registry)
    clock = Clock()
    while s.step < s.run.steps:
        each(s, "before_step", s.step + 1)
        record = step(s, clock)
        if s.members:
            with clock("callback"):
                record.metrics |= each(s, "after_step", record, not record.skipped)
        verdicts = [] if record.finite or s.precision.scales else [not_finite(record)]
        verdicts += [v for name, check in s.health.items() for v in observe_step(s, name, check, record)]
        due = s.checkpointer.due(s.step, record.step_seconds, s.run.checkpoint.every)
        agreed = agree(s.comms.world, s.device, record.step_seconds, stop_requested(), verdicts, due)
        record.rank_seconds = agreed.rank_seconds
        record.verdicts = [verdict.to_dict() for verdict in agreed.verdicts]
        action = decide(agreed.verdicts)
        keeps = action < Action.ROLL_BACK and s.checkpointer.keeps
        saves = keeps and (agreed.due or bool(agreed.signal and s.run.run.save_on_signal))
        if action < Action.ROLL_BACK and s.run.validate.every and s.step % s.run.validate.every == 0:
            with clock("validate"):
                validate(s, record)
        if saves:
            record.checkpoint = str(CheckpointId(s.step, s.attempt))
        record.saving, record.failed_save = s.saving.progress if s.saving else None, s.failed_save
        record.saved, s.fresh = s.fresh, None
        # Before the save: a kill in between must not leave a checkpoint of a step that no tracker has seen.
        s.reporter.record(record)
        clock = Clock()
        if saves:
            with clock("checkpoint"):
                save(s, last=bool(agreed.signal))
        poll(s)
        for verdict in agreed.verdicts:
            s.reporter.note(f"{verdict.suggestion.name.lower()}: {verdict}")
        evidence = "; ".join(str(verdict) for verdict in agreed.verdicts if verdict.suggestion == action)
        if action is Action.ROLL_BACK and not roll_back(s, evidence):
            return Ending("stop", f"{evidence}; there is no checkpoint to go back to")
        tell(s)
        if action in (Action.RESTART, Action.STOP):
            return Ending(action.name.lower(), evidence)
        if agreed.signal:
            return Ending(agreed.signal)
    return Ending("done")


def step(s: Session, clock: Clock) -> StepRecord:
    """One step: read, forward and backward, clip, update. Where it is not finite nothing is updated."""
    with clock("data"):
        micro_batches = s.batches.take(s.cursor, s.step)
    with clock("forward_backward"):
        result = s.runtime.step(micro_batches)
    learning_rate = s.run.optimizer.learning_rate * s.schedule(s.step)
    with clock("optimizer"):
        grad_norm = s.runtime.clip(s.run.optimizer.clip_norm)
        if result.finite:
            s.optimizer.step(learning_rate)
            s.runtime.applied()
        s.precision.update(found_inf=not result.finite)
    s.step += 1
    s.cursor += s.run.batch.global_size
    s.tokens += result.tokens
    seconds = sum(clock.seconds[phase] for phase in ("data", "forward_backward", "optimizer"))
    read = s.run.batch.global_size * s.run.batch.sequence_length / seconds
    return StepRecord(
        step=s.step,
        attempt=s.attempt,
        loss=result.loss_sum / result.tokens if result.tokens else math.nan,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        tokens=result.tokens,
        tokens_per_second=read,
        mfu=s.reporter.mfu(read),
        step_seconds=seconds,
        seconds=clock.seconds,
        memory_bytes=peak_memory(s.device),
        finite=result.finite,
        skipped="" if result.finite else "loss or gradients are not finite",
        metrics=summed_up(s, result.metrics),
    )


def summed_up(s: Session, metrics: dict[str, float | list[float]]) -> dict[str, float | list[float]]:
    """What modules emitted, and what the edits that put them there make of it."""
    more = [options.summary(metrics) for options in s.run.edits.values()]
    return {name: value for found in (metrics, *more) for name, value in found.items()}


def not_finite(record: StepRecord) -> Verdict:
    """Core's own verdict; a health check may override it."""
    evidence = f"loss {record.loss}, gradient norm {record.grad_norm}; the weights were left as they were"
    return Verdict("not-finite", f"step {record.step}", 1.0, evidence, Action.STOP)


def observe_step(s: Session, name: str, check, record: StepRecord) -> list[Verdict]:
    """One check's verdicts on one step."""
    if record.step % check.every:
        return []
    check.collective(s.comms.world)
    return observe(s, name, lambda: check.observe(record))


def observe(s: Session, name: str, call) -> list[Verdict]:
    """What a check says; what it raises is named and ends nothing."""
    try:
        return list(call())
    except Exception as error:
        s.reporter.note(f"health={name} failed: {type(error).__name__}: {error}")
        return []


def save(s: Session, last: bool = False) -> None:
    """Begin a checkpoint. One save is in flight at a time; one that comes to nothing is told by a note."""
    poll(s, wait=True)
    each(s, "before_save", s.step)
    if last:
        s.checkpointer.ending()
    try:
        s.saving = s.checkpointer.save(s.step, s.shards(), s.registry, capture(s).to_dict())
    except SaveFailed as error:
        give_up(s, error)
        return
    each(s, "after_save", s.saving.id)


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
    for note in (*s.notes, *s.checkpointer.notices()):
        s.reporter.note(note)
    s.notes.clear()


def give_up(s: Session, error: SaveFailed) -> None:
    """A save came to nothing: say so, once, and train on; the end of the run looks at it again."""
    s.failed_save = error.why
    goes_on = ", and training goes on" if s.step < s.run.steps else ""
    s.reporter.note(f"{error}; what was saved before is untouched{goes_on}")
