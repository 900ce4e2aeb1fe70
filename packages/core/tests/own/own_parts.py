"""Plugin `own_parts`: one part of every group that a run needs, so that core trains without other packages.

A table of logits learns which token follows which, in float64, by plain gradient descent, in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline import Part, hookimpl
from gangline.config import (
    CheckpointConfig,
    DataConfig,
    GradientsConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrackConfig,
)
from gangline.model.tree import Node
from gangline.plan import Init, Plan


@dataclass(frozen=True, kw_only=True)
class TableNode(Node):
    """Table with a row for each token: the logits of the next token."""

    module: ClassVar[str] = "own_runtime:Table"
    vocab_size: int

    def get_shapes(self):
        return {"weight": (self.vocab_size, self.vocab_size)}

    def count_flops(self, sequence_length):
        return 0  # the lookup of a row needs no matmul


@dataclass
class Table(ModelConfig):
    vocab_size: int = 8


def table(config, run):
    plan = Plan("", "blocks", "", 0, inits=(Init("weight", "normal", 0.1),), facts={"vocab_size": config.vocab_size})
    return TableNode(vocab_size=config.vocab_size), plan


@dataclass
class Alone(ParallelConfig):
    def count_ranks(self, gpus):
        return 1


@dataclass
class Sum(GradientsConfig):
    plain: ClassVar[bool] = True


@dataclass
class Exact(PrecisionConfig):
    pass


@dataclass
class Descent(OptimizerConfig):
    learning_rate: float = 0.5


@dataclass
class Level(ScheduleConfig):
    pass


def no_ranks(config, run):
    raise NotImplementedError("there is one rank, and nothing to sum")


def level(config, run):
    return lambda step: 1.0


@dataclass
class Arrays(CheckpointConfig):
    pass


@dataclass
class Steps(DataConfig):
    """Corpus in which each token is the previous token plus one or two, modulo the vocabulary size."""


@dataclass
class Quiet(TrackConfig):
    pass


@dataclass
class Here(LaunchConfig):
    pass


OFFERED = {
    "model": ("table", Table, "own_parts:table"),
    "parallel": ("alone", Alone, "own_runtime:AloneRuntime"),
    "gradients": ("sum", Sum, "own_parts:no_ranks"),
    "precision": ("exact", Exact, "own_runtime:exact"),
    "optimizer": ("descent", Descent, "own_runtime:DescentOptimizer"),
    "schedule": ("level", Level, "own_parts:level"),
    "checkpoint": ("arrays", Arrays, "own_checkpoints:build"),
    "data": ("steps", Steps, "own_io:StepsSource"),
    "track": ("quiet", Quiet, "own_io:QuietTracker"),
    "launch": ("here", Here, "own_io:HereLauncher"),
}


@hookimpl
def gangline_parts():
    for group, (name, config, build) in OFFERED.items():
        yield Part(group=group, name=name, config=config, build=build, summary=f"the {group} of this set", default=True)
