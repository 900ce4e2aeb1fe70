"""The training loop: batch -> forward and backward -> clip -> optimizer -> health -> report -> checkpoint."""

from __future__ import annotations

import gc
import math
import time

from gangline.checkpoint.id import CheckpointId
from gangline.health import Action, Verdict
from gangline.launch.signals import stop_requested
from gangline.record import StepRecord
from gangline.run import attempts
from gangline.train import verdicts
from gangline.train.agree import agree, compute_rank_mfu
from gangline.train.callbacks import call_before_clip, call_each
from gangline.train.emitted import Emitted, hash_metrics, refuse_unlike
from gangline.train.reference_model import introduce
from gangline.train.report import Clock, measure_peak_memory
from gangline.train.responses import Ending, announce, carry_out
from gangline.train.save import make_request, poll, save, settle, tell
from gangline.train.session import Session
from gangline.train.unreported import flush, report
from gangline.train.validate import validate


def run_steps(s: Session) -> Ending:
    """Run steps until the run is done, or a signal or a response ends it; return how it ended."""
    response, agreement = verdicts.before_run(s)
    announce(s, response, agreement)
    if ending := carry_out(s, response, agreement):
        return ending
    if signal := introduce(s):
        return Ending(signal)
    call_each(s, "begin", s.step)
    s.checkpointer.prepare(s.saved_registry)
    clock, first_step = Clock(), s.step
    while s.step < s.run.steps:
        clock.pulse.step(s.step + 1)
        flush(s)
        call_each(s, "before_step", s.step + 1)
        record, own_loss, before = step(s, clock)
        emitted: Emitted = {}
        if s.members:
            with clock("callback"):
                emitted = call_each(s, "after_step", record, not record.skipped)
            record.metrics |= emitted
        request = s.checkpointer.get_due_save(s.step, record.step_seconds, s.run.checkpoint.every)
        own_verdicts = verdicts.after_step(s, record)
        own = record.step_seconds - clock.seconds.get("sync", 0.0)  # without the wait for slower ranks
        due, ahead = request is not None, Clock()
        with ahead("sync"):  # counts in the next step's seconds; on a GPU it includes the wait for the optimizer
            if s.run.job.gc_every and s.step % s.run.job.gc_every == 0:
                gc.collect()
            rows, same = clock.pulse.take_rows(), hash_metrics(emitted)
            status = agree(s.comms.world, own, stop_requested(), own_verdicts, due, rows, own_loss, same)
        if not status.metrics_alike:
            refuse_unlike(s, emitted)
        record.rank_seconds, record.rank_phases = status.rank_seconds, status.rank_phases
        record.rank_losses = status.rank_losses
        if record.step > first_step + 1:  # the rows of a start's first step include time before the step
            record.rank_mfu = compute_rank_mfu(record.mfu, record.step_seconds, status)
        response, agreement = verdicts.judge(s, [*before, *status.verdicts], status.now, record)
        record.verdicts = [verdict.to_dict() for verdict in agreement.verdicts]
        stays = response.action < Action.ROLL_BACK
        saves = stays and s.checkpointer.keeps
        saves = saves and (status.due or bool(status.signal and s.run.job.save_on_signal))
        if stays and s.run.validate.every and s.step % s.run.validate.every == 0:
            with clock("validate"), s.enter_phase("validate"):
                validate(s, record)
        if saves:
            record.checkpoint = str(CheckpointId(s.step, s.attempt))
        record.saving, record.failed_save = s.settling[-1].progress if s.settling else None, s.failed_save
        record.saved, s.fresh = s.fresh, None
        if saves or not stays:  # the previous save must end first
            with ahead("checkpoint"):
                settle(s)
        # Before the save: a kill must not leave a checkpoint of a step that no tracker has recorded.
        report(s, record, waits=saves and request is not None and request.record_waits)
        clock = ahead
        if saves:
            with clock("checkpoint"):
                save(s, make_request(s, request, stops=bool(status.signal)))
        poll(s)
        announce(s, response, agreement)
        ending = carry_out(s, response, agreement)
        tell(s)
        if ending or status.signal:
            return ending or Ending(status.signal)
    return Ending("done")


def step(s: Session, clock: Clock) -> tuple[StepRecord, float | None, tuple[Verdict, ...]]:
    """Run one step; return (its record, this rank's own loss or None, verdicts of checks before the update).

    If the step is not finite, or a response skips it, the weights are not updated.
    """
    s.cursor = attempts.find_next_cursor(s.history, s.cursor, s.run.batch.get_size)
    size = s.run.batch.get_size(s.cursor)
    with clock("data"):
        microbatches = s.batches.take(s.cursor, s.step, size)
    with clock("forward_backward"):
        result = s.runtime.step(microbatches)
    flush(s)
    loss = result.loss_sum / result.tokens if result.tokens else math.nan
    learning_rate = s.run.optimizer.learning_rate * s.schedule(s.step) * attempts.compute_rate(s.history, s.step + 1)
    if s.members:
        with clock("callback"):
            call_before_clip(s)
    with clock("optimizer"):
        grad_norm = s.runtime.clip(s.run.optimizer.clip_norm)
        finite = result.finite and math.isfinite(grad_norm)  # a callback may have changed the gradients
        refused, check_verdicts = verdicts.before_update(s, loss, grad_norm) if finite else ("", ())
        skipped = refused if finite else "loss or gradients are not finite"
        if not skipped:
            s.optimizer.step(learning_rate)
            s.runtime.finish_update()
        s.precision.update(found_inf=not finite)
    first = s.cursor
    s.step += 1
    s.cursor += size
    s.tokens += result.tokens
    seconds = sum(clock.seconds.get(phase, 0.0) for phase in ("sync", "data", "forward_backward", "optimizer"))
    read = size * s.run.batch.sequence_length / seconds
    record = StepRecord(
        step=s.step,
        attempt=s.attempt,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        tokens=result.tokens,
        tokens_per_second=read,
        mfu=s.reporter.compute_mfu(read),
        step_seconds=seconds,
        first_sample=first,
        seconds=clock.seconds,
        memory_bytes=measure_peak_memory(s.device),
        finite=finite,
        skipped=skipped,
        metrics=summarise_metrics(s, result.metrics),
        time=time.time(),
        monotonic=time.monotonic(),
        generation=s.events.generation,
    )
    return record, result.own_loss_sum / result.own_tokens if result.own_tokens else None, check_verdicts


def summarise_metrics(s: Session, metrics: dict[str, float | list[float]]) -> dict[str, float | list[float]]:
    """Return the metrics that modules emitted, and metrics that the run's edits derive from these."""
    more = [options.summarise(metrics) for options in s.run.edits.values()]
    return {name: value for metric_set in (metrics, *more) for name, value in metric_set.items()}
