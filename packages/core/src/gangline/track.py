"""Trackers: the contract of writers of step records. They run on global rank 0 only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from gangline.record import StepRecord


@dataclass(frozen=True)
class Start:
    """Data that a tracker gets when the run begins or continues."""

    name: str
    directory: str
    first_step: int  # number of steps done before this start: 0, or the step of the resume
    last_step: int
    attempt: int
    parameters: int
    world: int
    describe: dict[str, str] = field(default_factory=dict)  # name -> line to show to people: data, model, layout, peak
    config: dict[str, Any] = field(default_factory=dict)


class Tracker(ABC):
    """Contract of a writer of step records. An exception of a tracker stops neither the run nor other trackers."""

    def begin(self, start: Start) -> None:
        """Start tracking, before the first step. Records after `start.first_step` belong to an abandoned branch."""

    @abstractmethod
    def record(self, record: StepRecord) -> None:
        """Write the record of a step. Called once a step."""

    def note(self, text: str) -> None:
        """Write a notice to people, such as a warning, a sample or a checkpoint."""

    def start_end(self, summary: dict[str, Any]) -> None:
        """Start to send the remaining records, without waiting; called before any `end`, so all send in parallel."""

    def end(self, summary: dict[str, Any]) -> None:
        """Finish after the last step, also when the run ends early; `summary` says how the run ended."""
