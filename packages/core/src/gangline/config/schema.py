"""A whole run as typed dataclasses: what Hydra fills, what Python can fill without Hydra, what a worker reads.

Torch-free. The names here are what users type (``batch.global_size=64``), so they stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from gangline.parts import (
    GROUPS,
    LISTS,
    CallbackConfig,
    CheckpointConfig,
    DataConfig,
    EditConfig,
    HealthConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PartConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrackConfig,
)
from gangline.ranges import AnyNumber, NonNegativeInt, PositiveInt


class Recompute(Enum):
    """Which activations are computed again in the backward pass instead of kept."""

    none = "none"
    selective = "selective"
    full = "full"


@dataclass
class RunSection:
    """The run itself."""

    name: str = "run"  # for people: it ends the directory's name
    dir: str | None = None  # null: runs/<date>-<time>-<name>
    seed: Annotated[int, AnyNumber()] = 0  # weights, the order of data and every other draw follow from it
    steps: PositiveInt = 300  # optimizer steps
    deterministic: bool = False  # sums over ranks in rank order, deterministic kernels: slower, reproducible to the bit
    device: str | None = None  # null: a GPU where there is one
    recompute: Recompute = Recompute.none  # what the backward pass computes again: none, selective (attention), full
    recompute_every: PositiveInt = 1  # of every n blocks one is recomputed
    compile: bool = False  # torch.compile, block by block
    sample: NonNegativeInt = 200  # tokens to write from the finished model; 0: none
    save_on_signal: bool = True  # SIGTERM or Ctrl-C: save a checkpoint at the step boundary, then end


@dataclass
class BatchSection:
    """How much data a step sees. global_size = micro_size x accumulation x data-parallel width."""

    global_size: PositiveInt = 16  # sequences a step, over all ranks
    micro_size: PositiveInt | None = None  # sequences a forward pass, on one rank; null: a rank's whole share
    sequence_length: PositiveInt = 128  # tokens


@dataclass
class ValidateSection:
    """Loss on held-out data: the run's own, and further sets, each the run's data part with other options.

    A set that is null is none: so a run that goes on, or a recipe's, can do without one.
    """

    every: PositiveInt | None = 100  # steps; null: never
    samples: PositiveInt = 64  # sequences of each set, rounded up to whole microbatches
    sets: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # more sets by name: {code: {path: src}}


@dataclass
class Run:
    """One run: sections of values, and one configuration for each part that was chosen.

    Which part a configuration belongs to is told by its class (`gangline.plugins.Installed.part_of`).
    """

    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    data: DataConfig
    launch: LaunchConfig
    run: RunSection = field(default_factory=RunSection)
    batch: BatchSection = field(default_factory=BatchSection)
    validate: ValidateSection = field(default_factory=ValidateSection)
    track: dict[str, TrackConfig] = field(default_factory=dict)  # part name -> its configuration
    health: dict[str, HealthConfig] = field(default_factory=dict)
    callback: dict[str, CallbackConfig] = field(default_factory=dict)
    edits: dict[str, EditConfig] = field(default_factory=dict)  # group -> the chosen edit; absent: off
    extra: dict[str, PartConfig] = field(default_factory=dict)  # groups that plugins added beside core's
    references: dict[str, str] = field(default_factory=dict)  # path -> "${oc.env:NAME}", written in place of its value

    @property
    def seed(self) -> int:
        return self.run.seed

    @property
    def steps(self) -> int:
        return self.run.steps

    @property
    def deterministic(self) -> bool:
        return self.run.deterministic

    def parts(self) -> Iterator[tuple[str, PartConfig]]:
        """Every chosen part's configuration under the group or path where a user finds it ("track.jsonl")."""
        for group in SINGLE:
            yield group, getattr(self, group)
        for group in LISTS:
            for name, config in getattr(self, group).items():
                yield f"{group}.{name}", config
        yield from self.edits.items()
        yield from self.extra.items()


SINGLE = tuple(group for group in GROUPS if group not in LISTS)  # the groups of which a run has exactly one part
SECTIONS = {"run": RunSection, "batch": BatchSection, "validate": ValidateSection}
