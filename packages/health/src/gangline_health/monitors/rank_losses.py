"""Monitor of ranks whose own loss differs from other ranks, because of bad data or wrong computation. Torch-free.

The monitor reads `rank_losses` of the step record. Ranks see different samples, so in each step their losses differ by
chance; the size of chance differences is estimated from all ranks over a window. A far larger difference in a single
step means an unusual batch, and is a note. A rank whose loss stays above or below the median rank in most steps of a
window does not differ by chance. The median of its differences is tested, which a few unusual batches do not change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gangline.health import Action, Verdict
from gangline_health.config import RankLossesOptions
from gangline_health.monitors.base import Monitor
from gangline_health.robust import NORMAL

if TYPE_CHECKING:
    from gangline.record import StepRecord

LEAST_RANKS = 3  # minimum number of ranks to compare: if two ranks differ, either may be wrong
LEAST_LOSS = 0.01  # minimum standard deviation of differences, as a share of the loss
SURPRISE = 100.0  # loss sum of one unpredictable sentence in a rank's batch, in nats, as in `numbers`
FARTHER = 2.0  # minimum difference of a spike, as a multiple of the largest difference in the window


class RankLossesMonitor(Monitor):
    """Monitor that keeps the loss difference of each rank from the median rank, for the last steps."""

    name = "rank_losses"

    def __init__(self, options: RankLossesOptions) -> None:
        self.options = options
        self.previous: StepRecord | None = None
        self.rows: list[dict[int, float]] = []  # for each step: rank -> its loss minus the median loss
        self.told: dict[int, int] = {}  # rank -> step of its last verdict on a sustained difference

    def describe(self) -> str:
        off = f"{self.options.sustained_score:g} robust deviations from the median rank"
        return f"ranks whose own loss is {off} in most of {self.options.window} steps"

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        # ranks exchange the values of a step after checks observe its record, so they are read in the next step
        previous, self.previous = self.previous, record
        if previous is not None and previous.rank_losses is not None:
            yield from self._judge(previous, previous.rank_losses)

    def _judge(self, record: StepRecord, losses: Sequence[float | None]) -> Iterable[Verdict]:
        own = {rank: loss for rank, loss in enumerate(losses) if loss is not None}
        if len(own) < LEAST_RANKS or not all(map(math.isfinite, own.values())):
            return
        if self.rows and self.rows[0].keys() != own.keys():
            self.load_state({})
        middle = statistics.median(own.values())
        row = {rank: loss - middle for rank, loss in own.items()}
        if len(self.rows) == self.options.window:
            yield from self._find_spikes(record, own, row, middle)
        self.rows = [*self.rows, row][-self.options.window :]
        if len(self.rows) == self.options.window:
            yield from self._find_sustained_differences(record, own, middle)

    def _estimate_noise(self, middle: float) -> float:
        """Return the robust standard deviation of chance loss differences, over all ranks and steps of the window."""
        apart = [abs(difference) for row in self.rows for difference in row.values()]
        return max(NORMAL * statistics.median(apart), LEAST_LOSS * abs(middle))

    def _find_spikes(
        self, record: StepRecord, own: dict[int, float], row: dict[int, float], middle: float
    ) -> Iterable[Verdict]:
        noise = self._estimate_noise(middle)
        farthest = max(abs(difference) for one in self.rows for difference in one.values())
        tokens = record.tokens / len(own)
        for rank, difference in row.items():
            far = abs(difference) / noise if noise else 0.0
            if far > self.options.spike_score and abs(difference) > max(FARTHER * farthest, SURPRISE / max(tokens, 1)):
                evidence = (
                    f"the own loss of rank {rank} is {own[rank]:.4g}, the loss of the median rank {middle:.4g}: "
                    f"{far:.1f} robust deviations apart; the batch begins at sample {record.first_sample}"
                )
                details = {"rank": rank, "step": record.step, "first": record.step, "score": far}
                yield Verdict("rank-loss-spike", f"rank {rank}", 0.7, evidence, Action.NOTE, details=details)

    def _find_sustained_differences(
        self, record: StepRecord, own: dict[int, float], middle: float
    ) -> Iterable[Verdict]:
        noise = self._estimate_noise(middle)
        for rank in own:
            off = statistics.median(row[rank] for row in self.rows)
            if not noise or abs(off) < self.options.sustained_score * noise:
                self.told.pop(rank, None)
                continue
            if record.step - self.told.get(rank, -self.options.report_every) < self.options.report_every:
                continue
            self.told[rank] = record.step
            first = max(1, record.step - self.options.window + 1)
            evidence = (
                f"the own loss of rank {rank} is {abs(off):.4g} {'above' if off > 0 else 'below'} the median "
                f"rank in most of {self.options.window} steps, {abs(off) / noise:.1f} robust deviations: "
                "check the data and the computation of this rank"
            )
            details = {
                "rank": rank, "step": record.step, "first": first, "score": abs(off) / noise, "exclude": f"rank {rank}",
            }  # fmt: skip
            yield Verdict("rank-loss", f"rank {rank}", 0.8, evidence, Action.WARN, details=details)

    def load_state(self, state: dict[str, Any]) -> None:
        """Clear the window, because another start may have other ranks."""
        self.previous = None
        self.rows, self.told = [], {}
