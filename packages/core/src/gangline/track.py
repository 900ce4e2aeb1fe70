"""Trackers: the contract of writers of step records. They run on global rank 0 only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from gangline.record import StepRecord


@dataclass(frozen=True)
class Start:
    """The data that a tracker gets when the run begins or continues."""

    name: str
    directory: str
    first_step: int  # number of the last step before this start: 0, or the step resumed from
    last_step: int
    attempt: int
    parameters: int
    world: int
    describe: dict[str, str] = field(default_factory=dict)  # lines worth showing: data, model, device, peak
    config: dict[str, Any] = field(default_factory=dict)


class Tracker(ABC):
    """Contract of a writer of step records. An exception of a tracker ends neither the run nor the other trackers."""

    def begin(self, start: Start) -> None:
        """Act before the first step. After a resume, records past `start.first_step` are of an abandoned branch."""

    @abstractmethod
    def record(self, record: StepRecord) -> None:
        """Write the record of a step. Called once a step."""

    def note(self, text: str) -> None:
        """Write a line for people: a warning, a sample, a checkpoint."""

    def start_end(self, summary: dict[str, Any]) -> None:
        """Begin to send the remaining records, without waiting; called before any `end`, so all send in parallel."""

    def end(self, summary: dict[str, Any]) -> None:
        """Act after the last step, also when the run ends early; `summary` says how it ended."""
