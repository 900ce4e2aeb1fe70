"""The step record: all that is said about one step. Trackers, health checks and the progress line read it alone."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field


@dataclass
class StepRecord:
    """One applied or skipped step. Seconds are wall time on global rank 0 unless said otherwise."""

    step: int  # counts from 1: the number of steps done
    attempt: int
    loss: float  # mean over the global count of valid tokens, in nats
    grad_norm: float  # global, before clipping
    learning_rate: float
    tokens: int  # valid tokens of this step, all ranks
    tokens_per_second: float
    mfu: float | None  # model FLOPs per second over the peak of all devices
    step_seconds: float
    # By phase: data, forward_backward, optimizer, validate; checkpoint is of the save between the step before and this.
    seconds: dict[str, float] = field(default_factory=dict)
    rank_seconds: dict[str, float] | None = None  # min, median, max of step_seconds over the ranks
    memory_bytes: int = 0  # peak of this rank: device memory on a GPU, resident set on a CPU
    finite: bool = True  # false: the optimizer left everything as it was
    skipped: str = ""  # why the optimizer did not step
    validation_loss: float | None = None  # on the held-out part of the run's own data, in the steps that had one
    validation_losses: dict[str, float] = field(default_factory=dict)  # by name, of what else was validated
    metrics: dict[str, float | list[float]] = field(default_factory=dict)
    verdicts: list[dict] = field(default_factory=list)
    checkpoint: str | None = None  # the id of the checkpoint whose save begins after this step
    saved: str | None = None  # the id of the checkpoint that has become whole since the step before
    saving: float | None = None  # of the save under way, the share that is written; None: there is none
    failed_save: str | None = None  # why the newest save that has ended came to nothing, if it did
    notes: list[str] = field(default_factory=list)  # what people were told since the step before

    def to_json(self) -> str:
        """One line, floats in full precision. Not finite: a string ("nan"), for JSON has no such number."""
        return json.dumps(_plain(asdict(self)), allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
