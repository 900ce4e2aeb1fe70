"""A plan: what a run holds, takes, costs and loses on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gangline.cluster import Cluster, Losses, losses
from gangline.explain import Explained
from gangline_planner.price.step import StepTime, step_time

STATE = ("master weights", "optimizer state", "callbacks")  # what a checkpoint holds of a rank, beside its weights


@dataclass(frozen=True)
class Forecast:
    """Everything that `gangline plan` prints. None: the cluster file lacks the numbers that it takes."""

    explained: Explained
    cluster: Cluster
    step: StepTime
    losses: Losses | None
    tokens: float | None  # to be trained on in all

    @property
    def world(self) -> int:
        return self.explained.mesh.world

    @property
    def memory(self) -> int:
        """Bytes on the fullest rank."""
        return self.explained.ranks[self.explained.fullest].memory

    @property
    def fits(self) -> bool:
        return self.memory <= self.cluster["memory.bytes"]

    @property
    def tokens_per_second(self) -> float:
        return self.explained.tokens / self.step.seconds

    @property
    def mfu(self) -> float:
        """Model operations, attention not discounted for causality, over the peak in 16 bits."""
        return self.explained.token_flops * self.tokens_per_second / (self.world * self.cluster["peak.bf16"])

    @property
    def days(self) -> float | None:
        """Of wall time for all tokens, failures included where their rate is known."""
        if self.tokens is None:
            return None
        return self.tokens / self.tokens_per_second / (self.losses.progress if self.losses else 1.0) / 86400

    @property
    def dollars(self) -> float | None:
        price = self.cluster.get("price.hour")
        return None if price is None or self.days is None else self.days * 24 * self.world * price

    @property
    def megawatt_hours(self) -> float | None:
        watts = self.cluster.get("watts")
        if watts is None or self.days is None:
            return None
        return self.days * 24 * self.world * (watts + (self.cluster.get("watts.rest") or 0.0)) / 1e6

    def data(self) -> dict[str, Any]:
        """All of it as plain data."""
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
            "dollars": self.dollars,
            "megawatt_hours": self.megawatt_hours,
            "checkpoint_interval_seconds": self.losses.interval if self.losses else None,
            "goodput": self.losses.progress if self.losses else None,
        }


def forecast(explained: Explained, cluster: Cluster, tokens: float | None = None) -> Forecast:
    """Raises UserError where the cluster file lacks what a step's time is made of."""
    return Forecast(explained, cluster, step_time(explained, cluster), _losses(explained, cluster), tokens)


def _losses(explained: Explained, cluster: Cluster) -> Losses | None:
    hours, bandwidth = cluster.get("failure.hours"), cluster.get("storage.bandwidth")
    restart = cluster.get("restart.seconds")
    if not hours or not bandwidth or restart is None:
        return None
    fullest = explained.ranks[explained.fullest]
    saved = sum(fullest.bytes.get(kind, 0) for kind in STATE) or fullest.bytes.get("weights", 0)
    between = hours * 3600 / explained.mesh.world
    try:
        return losses(stall=max(saved / bandwidth, 1e-3), between_failures=between, restart=restart)
    except ValueError:
        return None
