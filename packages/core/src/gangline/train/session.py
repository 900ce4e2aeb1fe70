"""Session: state of one rank during training."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from gangline.callback import Callback
from gangline.checkpoint.base import Checkpointer, SaveHandle
from gangline.checkpoint.base_weights import BaseWeights
from gangline.comm.base import Comms
from gangline.config.schema import Run
from gangline.data.base import DataSource
from gangline.health import HealthCheck
from gangline.mesh import Mesh
from gangline.model.compose import Composed
from gangline.optimizer import Optimizer
from gangline.precision import Precision
from gangline.record import StepRecord
from gangline.run.attempts import Attempt
from gangline.run.directory import RunDirectory
from gangline.run.events import Events
from gangline.runtime import Runtime
from gangline.schedule import LearningRateSchedule
from gangline.shard import Registry, Shard
from gangline.train.batches import Batches
from gangline.train.report import Reporter


@dataclass
class Session:
    """The run's built parts, and the progress of the run on this rank."""

    composed: Composed
    base: BaseWeights
    directory: RunDirectory
    mesh: Mesh
    comms: Comms
    device: torch.device
    precision: Precision
    runtime: Runtime
    optimizer: Optimizer
    schedule: LearningRateSchedule
    source: DataSource
    batches: Batches
    validation: Batches | None
    validation_sets: dict[str, Batches]  # extra validation sets, by name
    checkpointer: Checkpointer
    callbacks: dict[str, Callback]
    health: dict[str, HealthCheck]
    reporter: Reporter

    step: int = 0  # number of steps done
    cursor: int = 0  # number of the next global sample
    tokens: int = 0  # number of valid tokens trained on
    attempt: int = 1
    saved: str | None = None  # id of the newest complete checkpoint
    fresh: str | None = None  # id of the checkpoint completed since the last record
    other_data: str = ""  # line for attempts.jsonl if the data differs from the checkpoint's
    newest: SaveHandle | None = None  # the newest save of this attempt
    settling: list[SaveHandle] = field(default_factory=list)  # saves in progress, oldest first
    unreported: StepRecord | None = None  # on rank 0: record that waits until the newest save is visible
    failed_save: str | None = None  # reason if the most recently ended save failed
    bad_weights: str = ""  # nonfinite weights that the newest save found, until a verdict reports them
    cut_off: str = ""  # reason if this rank has lost the job's store and cannot save any more
    first_states: dict[str, dict[str, Any]] = field(default_factory=dict)  # place -> state right after `attach`
    untold: dict[str, bool] = field(default_factory=dict)  # errors of checks on this rank -> whether they are reported
    notes: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)  # name of each rank's node
    history: list[Attempt] = field(default_factory=list)  # the lines of attempts.jsonl
    events: Events = field(default_factory=lambda: Events(None))

    @property
    def run(self) -> Run:
        return self.composed.run

    def record_event(self, name: str, **content: Any) -> None:
        """Write a line to events.jsonl."""
        self.events.write(name, attempt=self.attempt, step=self.step, **content)

    def enter_phase(self, name: str) -> AbstractContextManager[None]:
        """Enter a phase other than a step for the block, with lines in events.jsonl at its start and its end."""
        return self.events.enter_phase(name, attempt=self.attempt, step=self.step)

    @property
    def members(self) -> dict[str, Callback]:
        """Place ("callback/ema") -> callback or check: first callbacks, then health checks, in configured order."""
        members: dict[str, Callback] = {f"callback/{name}": part for name, part in self.callbacks.items()}
        return members | {f"health/{name}": part for name, part in self.health.items()}

    def close_readers(self) -> None:
        """End the threads of batch readers."""
        for batches in (self.batches, self.validation, *self.validation_sets.values()):
            if batches is not None:
                batches.close()

    @property
    def registry(self) -> Registry:
        """Registry of all arrays of the run's state."""
        registry = self.runtime.registry | self.optimizer.registry | self.runtime.local()[0]
        for member in self.members.values():
            registry = registry if member.registry is None else registry | member.registry
        return registry

    @property
    def saved_registry(self) -> Registry:
        """Registry of all arrays that a checkpoint stores."""
        every = self.registry
        return Registry(every.mesh, {name: every[name] for name in every if name not in self.base.left_out})

    def shards(self) -> list[Shard]:
        """Return the shards of the run's state that this rank holds."""
        theirs = [shard for member in self.members.values() for shard in member.shards()]
        return [*self.runtime.shards(), *self.optimizer.shards(), *self.runtime.local()[1], *theirs]
