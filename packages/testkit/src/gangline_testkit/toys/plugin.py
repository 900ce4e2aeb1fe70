"""Entry module of the toy parts, with configurations and hooks. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from gangline.config.ranges import NonNegativeFloat, PositiveInt
from gangline.config.schema import (
    CallbackConfig,
    CheckpointConfig,
    DataConfig,
    EditConfig,
    HealthConfig,
    ParallelConfig,
    TrackConfig,
)
from gangline.errors import Problem
from gangline.model.tree import Node, Shape, iterate_nodes, replace_node
from gangline.plan import Fold, Init, Plan, ShardRule, matches
from gangline.plugin.hooks import hookimpl
from gangline.plugin.parts import Part


@dataclass
class Rows(ParallelConfig):
    """Shards every parameter of two or more dims by rows over `dp_shard`, and replicates vectors."""

    def count_ranks(self, gpus: int) -> int:
        return gpus or 2

    def size_axes(self, world: int) -> dict[str, int]:
        return {"dp_shard": world}


@dataclass
class Apart(ParallelConfig):
    """Trains a separate replica on each rank, and averages the weights every `every` steps (local SGD)."""

    every: PositiveInt = 4  # interval in steps between averages of the weights over all ranks

    def count_ranks(self, gpus: int) -> int:
        return gpus or 2


@dataclass
class Lanes(EditConfig):
    """Replaces each feed-forward by parallel narrow feed-forwards (lanes), sharded over a fold of `dp_shard`."""

    lanes: PositiveInt = 4  # number of lanes
    width: PositiveInt = 8  # hidden width of a lane
    fold: PositiveInt = 1  # number of ranks that share the lanes
    penalty: NonNegativeFloat = 0.01  # coefficient of the emitted penalty loss

    def check(self, run) -> list[Problem]:
        if self.lanes % self.fold:
            return [Problem(f"lanes.lanes={self.lanes} must be a multiple of lanes.fold={self.fold}.")]
        return []


@dataclass(frozen=True, kw_only=True)
class LanesNode(Node):
    """Node of a plugin's own module, which core does not know."""

    module: ClassVar[str] = "gangline_testkit.toys.lanes:LanesModule"
    dim: int
    lanes: int
    width: int
    penalty: float

    def get_shapes(self) -> dict[str, Shape]:
        return {"w_in": (self.lanes, self.width, self.dim), "w_out": (self.lanes, self.dim, self.width)}

    def emits_loss(self) -> bool:
        return self.penalty > 0


def edit_lanes(tree: Node, plan: Plan, options: Lanes) -> tuple[Node, Plan, list[str]]:
    """Replace the feed-forward of every block by a `LanesNode`, and return (tree, plan, claimed paths)."""
    claimed = [path for path, _ in iterate_nodes(tree) if path.endswith(".feed_forward")]
    for path in claimed:
        dim = dict(iterate_nodes(tree))[path].dim  # type: ignore[attr-defined]
        node = LanesNode(dim=dim, lanes=options.lanes, width=options.width, penalty=options.penalty)
        tree = replace_node(tree, path, node)
    there = f"{plan.blocks}.*.feed_forward"
    plan = replace(
        plan,
        sharding=tuple(rule for rule in plan.sharding if not matches(there, rule.pattern)),
        inits=tuple(init for init in plan.inits if not matches(there, init.pattern)),
        names=tuple(name for name in plan.names if not matches(there, name.pattern)),
    )
    plan = plan.extend(
        sharding=(ShardRule(f"{there}.w_in", 0, "lane"), ShardRule(f"{there}.w_out", 0, "lane")),
        inits=(Init(f"{there}.balance", "constant", 0.0), Init(there, "normal", 0.1)),
        folds=(Fold("lane", options.fold, ("dp_shard",)),),
    )
    return tree, plan, claimed


@dataclass
class Nan(HealthConfig):
    """Skips steps that are not finite, and stops the run after `patience` consecutive ones."""

    patience: PositiveInt = 3  # number of consecutive steps that are not finite before the run stops


@dataclass
class Previous(CallbackConfig):
    """Stores a copy of the weights before the newest step."""


@dataclass
class Files(CheckpointConfig):
    """Writes one .npy file per box and an index, and commits the checkpoint by a rename."""

    keep_last: int | None = None  # number of newest complete checkpoints to keep; null: keep all


@dataclass
class Numbers(DataConfig):
    """Reads a text of counting numbers, or the file `path`. Every tenth window is held out for validation."""

    numbers: PositiveInt = 2000  # number of words of the built-in text


@dataclass
class LineFile(TrackConfig):
    """Writes a text file with one line per step."""


@hookimpl
def gangline_parallel_strategies() -> Iterable[Part]:
    yield Part(name="rows", config=Rows, build="gangline_testkit.toys.rows:build", summary="Toy: rows over dp_shard")
    yield Part(
        name="apart",
        config=Apart,
        build="gangline_testkit.toys.apart:build",
        summary="Toy: local SGD, replicas that average their weights at intervals",
        layout_dependent="each replica trains on its own samples, and replicas average their weights at intervals",
    )


@hookimpl
def gangline_checkpointers() -> Iterable[Part]:
    yield Part(
        name="files", config=Files, build="gangline_testkit.toys.files:FilesCheckpointer", summary="Toy: .npy files"
    )


@hookimpl
def gangline_data_sources() -> Iterable[Part]:
    yield Part(
        name="numbers", config=Numbers, build="gangline_testkit.toys.numbers:NumbersSource", summary="Toy: numbers"
    )


@hookimpl
def gangline_health_checks() -> Iterable[Part]:
    yield Part(name="nan", config=Nan, build="gangline_testkit.toys.nan:NanCheck", summary="Toy: nonfinite steps")


@hookimpl
def gangline_model_edits() -> Iterable[Part]:
    yield Part(
        name="on",
        config=Lanes,
        build="gangline_testkit.toys.plugin:edit_lanes",
        summary="Toy: parallel narrow feed-forwards on a fold",
        group="lanes",
    )


@hookimpl
def gangline_trackers() -> Iterable[Part]:
    yield Part(
        name="lines", config=LineFile, build="gangline_testkit.toys.lines:LinesTracker", summary="Toy: text file"
    )


@hookimpl
def gangline_callbacks() -> Iterable[Part]:
    yield Part(
        name="previous",
        config=Previous,
        build="gangline_testkit.toys.previous:PreviousCallback",
        summary="Toy: copy of the weights before the newest step",
    )
