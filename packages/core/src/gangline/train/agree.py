"""Sync of ranks at every step boundary: one small all-gather of host tensors, which does not wait for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gangline.comm.base import Comm
from gangline.comm.objects import gather_json
from gangline.comm.pulsed import unwrap_pulse
from gangline.data.base import DataSource
from gangline.errors import UserError
from gangline.health import Verdict
from gangline.pulse.layout import ROWS

WORK = ("data", "forward", "backward", "optimizer")  # phases that count as a rank's busy time
_SIGNALS = ("", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class Gathered:
    """Result of a sync, equal on every rank."""

    rank_seconds: dict[str, float] | None  # min, median, max of step seconds without the sync; None on one rank
    rank_phases: dict[str, list[float]] | None  # seconds by phase and rank, 6 decimals; None if ranks pass no phases
    rank_losses: list[float | None] | None  # mean loss in nats by rank (None: computes no loss); None on one rank
    signal: str  # name of the stop signal that a rank got, or ""
    verdicts: list[Verdict]  # verdicts of all ranks, in rank order
    due: bool  # whether any rank requests a checkpoint
    now: float  # seconds since the epoch, on rank 0
    metrics_alike: bool = True  # whether callbacks returned the same metrics on all ranks


def agree(
    world: Comm,
    seconds: float,
    signal: str | None,
    verdicts: list[Verdict],
    due: bool,
    own_phases: Sequence[float] = (),
    own_loss: float | None = None,
    metrics: float = 0.0,
) -> Gathered:
    """Gather seconds of the step and of its phases, losses, stop signals, verdicts and requests for a checkpoint.

    own_phases: seconds of this rank in each of `gangline.pulse.layout.ROWS`. own_loss: this rank's loss.
    metrics: `gangline.train.emitted.hash_metrics` of the callbacks' metrics on this rank.
    """
    if world.size == 1:
        return Gathered(None, group_by_phase([own_phases]), None, signal or "", verdicts, due, time.time())
    number = _SIGNALS.index(signal) if signal in _SIGNALS else 0
    none = -1.0 if own_loss is None else 0.0  # NaN is a valid loss
    row = [seconds, number, len(verdicts), due, time.time(), none, own_loss or 0.0, metrics, *own_phases]
    rows = world.all_gather(torch.tensor([row], dtype=torch.float64)).tolist()
    times = [row[0] for row in rows]
    spread = {"min": min(times), "median": statistics.median(times), "max": max(times)}
    all_verdicts = _share(world, verdicts) if any(row[2] for row in rows) else []
    signalled = _SIGNALS[int(max(row[1] for row in rows))]
    phases, losses = group_by_phase([row[8:] for row in rows]), [None if row[5] else row[6] for row in rows]
    due, alike = any(row[3] for row in rows), all(row[7] == metrics for row in rows)
    return Gathered(spread, phases, losses, signalled, all_verdicts, due, rows[0][4], alike)


def check_all_true(world: Comm, mine: bool) -> bool:
    """Return whether `mine` is true on all ranks. Not recorded in the pulse: a watcher sees a polling rank as idle."""
    if world.size == 1:
        return mine
    return bool(unwrap_pulse(world).all_gather(torch.tensor([float(mine)])).all())


def group_by_phase(rows: Sequence[Sequence[float]]) -> dict[str, list[float]] | None:
    """Return phase -> list of seconds by rank, from a row of seconds for each rank; None for empty rows."""
    if not rows[0]:
        return None
    columns = zip(*rows, strict=True)
    return {name: [round(seconds, 6) for seconds in column] for name, column in zip(ROWS, columns, strict=True)}


def compute_rank_mfu(mfu: float | None, step_seconds: float, gathered: Gathered) -> list[float] | None:
    """Return the MFU of each rank if the step took only the rank's busy seconds; None if it is unknown.

    Busy seconds are capped at `step_seconds`, because they may include a validation before the step.
    """
    if mfu is None or gathered.rank_phases is None:
        return None
    work = [gathered.rank_phases[name] for name in WORK]
    own = [min(sum(seconds), step_seconds) for seconds in zip(*work, strict=True)]
    return [mfu * (step_seconds / seconds) if seconds > 0 else mfu for seconds in own]


def gather_verdicts(world: Comm, verdicts: list[Verdict]) -> tuple[list[Verdict], float]:
    """Return (the verdicts of all ranks, in rank order; seconds since the epoch on rank 0)."""
    if world.size == 1:
        return verdicts, time.time()
    rows = world.all_gather(torch.tensor([[len(verdicts), time.time()]], dtype=torch.float64)).tolist()
    return _share(world, verdicts) if any(row[0] for row in rows) else [], rows[0][1]


def check_same_data(world: Comm, sources: dict[str, DataSource]) -> None:
    """Raise UserError if ranks opened different data under one name, for example while a corpus is being extended."""
    if world.size == 1:
        return
    everyone = gather_json(world, {name: source.compute_fingerprint() for name, source in sources.items()})
    for name in sources:
        odd = [rank for rank, one in enumerate(everyone) if one[name] != everyone[0][name]]
        if odd:
            raise UserError(
                f"the ranks do not read the same {name} data: rank {odd[0]} opened {everyone[odd[0]][name]}, "
                f"rank 0 {everyone[0][name]}.",
                "The data changed while the ranks started, or their machines have different copies.",
                "Start again when the data is complete and equal on all machines.",
            )


def _share(world: Comm, verdicts: list[Verdict]) -> list[Verdict]:
    contents = gather_json(world, [verdict.to_dict() for verdict in verdicts])
    return [Verdict.of(content) for part in contents for content in part]
