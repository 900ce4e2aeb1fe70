"""Validation: losses of the run's weights, and of the weight sets of callbacks, on held-out samples."""

from __future__ import annotations

from gangline.record import StepRecord
from gangline.train.batches import Batches
from gangline.train.callbacks import call_each, iterate_lent_weights
from gangline.train.emitted import match_metrics, refuse_unlike
from gangline.train.session import Session


def validate(s: Session, record: StepRecord) -> None:
    """Write all validation losses into the record; for weight sets of callbacks under names such as "ema/0.999"."""
    call_each(s, "before_validation", s.step)
    record.validation_loss, record.validation_losses = compute_losses(s)
    for name, context in iterate_lent_weights(s):
        with context:
            default, sets = compute_losses(s)
        record.validation_losses[name] = default
        record.validation_losses |= {f"{name}/{held_out}": loss for held_out, loss in sets.items()}
    emitted = call_each(s, "after_validation", record)
    if s.callbacks and not match_metrics(s, emitted):
        refuse_unlike(s, emitted)
    record.metrics |= emitted


def compute_losses(s: Session) -> tuple[float, dict[str, float]]:
    """Return (loss on the held-out part of the run's data, losses on the sets by name), with the current weights."""
    assert s.validation is not None
    return compute_loss(s, s.validation), {
        name: compute_loss(s, held_out) for name, held_out in s.validation_sets.items()
    }


def compute_loss(s: Session, held_out: Batches) -> float:
    """Return the mean loss over held-out samples."""
    loss_sum, tokens = s.runtime.evaluate(held_out.read_held_out(s.run.validate.samples))
    return loss_sum / max(tokens, 1)
