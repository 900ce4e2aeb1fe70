"""Plan of a run on a cluster: memory, step time, cost, and losses to failures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gangline import UserError
from gangline.explain.explained import Explained
from gangline.explain.reliability import DAY, Reliability
from gangline_basics.cluster.file import Cluster
from gangline_planner.price.step import Pieces, StepTime, compute_step_time

# kinds of memory that a checkpoint stores; if a rank has none of them, its checkpoint stores the weights
STATE = ("master weights", "optimizer state", "callbacks")
LEAST = 1e-3  # minimum goodput for which `days` is computed


@dataclass(frozen=True)
class Forecast:
    """Plan of a run: everything that `gangline plan` prints.

    A property is None if the cluster file lacks the numbers for it. Cost, goodput and saves are also None if the layout
    does not fit into memory.
    """

    explained: Explained
    cluster: Cluster
    step: StepTime
    reliability: Reliability | None
    tokens: float | None  # number of tokens to train on in total

    @property
    def world(self) -> int:
        return self.explained.mesh.world

    @property
    def memory(self) -> int:
        """Memory of the fullest rank, in bytes."""
        return self.explained.ranks[self.explained.fullest].memory

    @property
    def fits(self) -> bool:
        return self.memory <= self.cluster["memory.bytes"]

    @property
    def tokens_per_second(self) -> float:
        return self.explained.tokens / self.step.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (MFU): model FLOPs, with attention as if not causal, over the 16-bit peak."""
        return self.explained.token_flops * self.tokens_per_second / (self.world * self.cluster["peak.bf16"])

    @property
    def save_every(self) -> float | None:
        """Optimal seconds of training between two saves, by Young and Daly."""
        return self.reliability.compute_young_daly() if self.reliability and self.fits else None

    @property
    def goodput(self) -> float | None:
        """Expected share of time in steps that no failure undoes, saving each `save_every`; 0 if no time is left."""
        if self.reliability is None or self.save_every is None:
            return None
        try:
            return self.reliability.compute_ettr(self.save_every)
        except OverflowError:
            return 0.0

    @property
    def save_stall(self) -> float | None:
        """Mean seconds by which saves delay a step."""
        if self.reliability is None or self.save_every is None:
            return None
        return self.step.seconds * self.reliability.save_seconds / self.save_every

    @property
    def tokens_per_day(self) -> float | None:
        """Tokens per day, reduced by the goodput if the failure rate is known."""
        if not self.fits:
            return None
        goodput = self.goodput
        return self.tokens_per_second * DAY * (1.0 if goodput is None else goodput)

    @property
    def days(self) -> float | None:
        """Days of wall time for all tokens; None also if the goodput is below `LEAST`."""
        each = self.tokens_per_day
        if self.tokens is None or each is None or each < LEAST * self.tokens_per_second * DAY:
            return None
        return self.tokens / each

    @property
    def dollars_per_day(self) -> float | None:
        price = self.cluster.get("price.hour")
        return None if price is None or not self.fits else 24 * self.world * price

    @property
    def dollars(self) -> float | None:
        return None if self.dollars_per_day is None or self.days is None else self.days * self.dollars_per_day

    @property
    def electricity_dollars(self) -> float | None:
        """Dollars for electricity alone; the price of a rented accelerator already includes it."""
        price = self.cluster.get("price.kwh")
        return None if price is None or self.megawatt_hours is None else self.megawatt_hours * 1000 * price

    def plan_tokens(self, tokens: float | None) -> Forecast:
        """Return the same plan for `tokens` tokens in total."""
        return replace(self, tokens=tokens)

    def plan_budget(self, budget: float) -> Forecast:
        """Return the plan for the tokens that `budget` dollars buy; its `tokens` is None if the layout does not fit.

        Raises UserError if the price is unknown.
        """
        price = self.cluster.get("price.hour")
        if not price:
            raise UserError(
                f"--budget needs the price of {self.cluster.name}, which is unknown.",
                "price.hour is missing in the cluster file.",
                "--price=DOLLARS sets the dollars per accelerator and hour.",
            )
        each = self.tokens_per_day
        return self.plan_tokens(None if each is None else budget / (24 * self.world * price) * each)

    @property
    def megawatt_hours(self) -> float | None:
        watts = self.cluster.get("watts")
        if watts is None or self.days is None:
            return None
        return self.days * 24 * self.world * (watts + (self.cluster.get("watts.rest") or 0.0)) / 1e6

    def to_dict(self) -> dict[str, Any]:
        """Return the complete plan as values for JSON."""
        fullest = self.explained.ranks[self.explained.fullest]
        return {
            "cluster": self.cluster.name,
            "world": self.world,
            "mesh": dict(self.explained.mesh.sizes),
            "schedule": self.explained.schedule,
            "microbatches": self.explained.microbatches,
            "tokens_per_step": self.explained.tokens,
            "step_seconds": self.step.seconds,
            "seconds": self.step.kinds,
            "bubble": self.step.timeline.bubble,
            "memory_bytes": self.memory,
            "memory": dict(fullest.bytes),
            "fits": self.fits,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "unknown": list(self.explained.unknown),
            "unknown_seconds": self.step.unknown,
            "days": self.days,
            "tokens": self.tokens if self.fits else None,
            "tokens_per_day": self.tokens_per_day,
            "dollars": self.dollars,
            "dollars_per_day": self.dollars_per_day,
            "megawatt_hours": self.megawatt_hours,
            "electricity_dollars": self.electricity_dollars,
            "mtbf_seconds": self.reliability.mtbf_seconds if self.reliability else None,
            "checkpoint_interval_seconds": self.save_every,
            "checkpoint_stall_seconds": self.save_stall,
            "goodput": self.goodput,
        }


def forecast(
    explained: Explained, cluster: Cluster, tokens: float | None = None, pieces: Pieces | None = None
) -> Forecast:
    """Return the plan of an explained run. Raises UserError if the cluster file lacks a number for the step time."""
    step = compute_step_time(explained, cluster, pieces)
    return Forecast(explained, cluster, step, _compute_reliability(explained, cluster), tokens)


def _compute_reliability(explained: Explained, cluster: Cluster) -> Reliability | None:
    hours, bandwidth = cluster.get("failure.hours"), cluster.get("storage.bandwidth")
    restart = cluster.get("restart.seconds")
    if not hours or not bandwidth or restart is None:
        return None
    fullest = explained.ranks[explained.fullest]
    checkpoint_bytes = sum(fullest.bytes.get(kind, 0) for kind in STATE) or fullest.bytes.get("weights", 0)
    return Reliability(
        mtbf_seconds=hours * 3600 / explained.mesh.world,
        save_seconds=max(checkpoint_bytes / bandwidth, 1e-3),
        recovery_seconds=restart,
    )
