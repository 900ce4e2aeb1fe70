"""Entry module of the toys: configurations and hooks, torch-free like every entry module."""

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
    """Every parameter of two dims and more sharded by rows over `dp_shard`; vectors replicated."""

    def count_ranks(self, gpus: int) -> int:
        return gpus or 2

    def size_axes(self, world: int) -> dict[str, int]:
        return {"dp_shard": world}


@dataclass
class Apart(ParallelConfig):
    """The full model on every rank, which steps by itself."""

    every: PositiveInt = 4  # steps between averages of the weights over all ranks

    def count_ranks(self, gpus: int) -> int:
        return gpus or 2


@dataclass
class Lanes(EditConfig):
    """Feed-forwards replaced by `lanes` narrow ones side by side, which `fold` ranks of `dp_shard` share."""

    lanes: PositiveInt = 4
    width: PositiveInt = 8
    fold: PositiveInt = 1
    penalty: NonNegativeFloat = 0.01  # weight of the emitted loss

    def check(self, run) -> list[Problem]:
        if self.lanes % self.fold:
            return [Problem(f"lanes.lanes={self.lanes} does not divide by lanes.fold={self.fold}")]
        return []


@dataclass(frozen=True, kw_only=True)
class LanesNode(Node):
    """A third-party node: it names its own module, which no table in the model lists."""

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
    """Replace every block's feed-forward by a LanesNode."""
    claimed = [path for path, _ in iterate_nodes(tree) if path.endswith(".feed_forward")]
    for path in claimed:
        dim = dict(iterate_nodes(tree))[path].dim  # type: ignore[attr-defined]
        node = LanesNode(dim=dim, lanes=options.lanes, width=options.width, penalty=options.penalty)
        tree = replace_node(tree, path, node)
    there = f"{plan.blocks}.*.feed_forward"
    plan = replace(
        plan,
        cuts=tuple(cut for cut in plan.cuts if not matches(there, cut.pattern)),
        inits=tuple(init for init in plan.inits if not matches(there, init.pattern)),
        names=tuple(name for name in plan.names if not matches(there, name.pattern)),
    )
    plan = plan.extend(
        cuts=(ShardRule(f"{there}.w_in", 0, "lane"), ShardRule(f"{there}.w_out", 0, "lane")),
        inits=(Init(f"{there}.balance", "constant", 0.0), Init(there, "normal", 0.1)),
        folds=(Fold("lane", options.fold, ("dp_shard",)),),
    )
    return tree, plan, claimed


@dataclass
class Nan(HealthConfig):
    """Skips a step that was not finite, and ends the run after `patience` such steps in a row."""

    patience: PositiveInt = 3


@dataclass
class Previous(CallbackConfig):
    """Keeps the weights from before the newest step."""


@dataclass
class Files(CheckpointConfig):
    """One .npy file for each box and one index, made visible by a rename."""

    keep_last: int | None = None  # number of newest complete checkpoints to keep; null: all


@dataclass
class Numbers(DataConfig):
    """Counting words, or the text in `path`; every tenth window is held out."""

    numbers: PositiveInt = 2000


@dataclass
class LineFile(TrackConfig):
    """A text file with one line per step."""


@hookimpl
def gangline_parallel_strategies() -> Iterable[Part]:
    yield Part(name="rows", config=Rows, build="gangline_testkit.toys.rows:build", summary="rows over dp_shard (a toy)")
    yield Part(
        name="apart",
        config=Apart,
        build="gangline_testkit.toys.apart:build",
        summary="replicas that meet now and then (a toy)",
        layout_dependent="each replica steps by the gradients of its own samples, then all take the mean",
    )


@hookimpl
def gangline_checkpointers() -> Iterable[Part]:
    yield Part(name="files", config=Files, build="gangline_testkit.toys.files:FilesCheckpointer", summary="plain files")


@hookimpl
def gangline_data_sources() -> Iterable[Part]:
    yield Part(name="numbers", config=Numbers, build="gangline_testkit.toys.numbers:NumbersSource", summary="counting")


@hookimpl
def gangline_health_checks() -> Iterable[Part]:
    yield Part(name="nan", config=Nan, build="gangline_testkit.toys.nan:NanCheck", summary="steps that are not finite")


@hookimpl
def gangline_model_edits() -> Iterable[Part]:
    yield Part(
        name="on",
        config=Lanes,
        build="gangline_testkit.toys.plugin:edit_lanes",
        summary="narrow feed-forwards side by side, on a fold",
        group="lanes",
    )


@hookimpl
def gangline_trackers() -> Iterable[Part]:
    yield Part(name="lines", config=LineFile, build="gangline_testkit.toys.lines:LinesTracker", summary="a text file")


@hookimpl
def gangline_callbacks() -> Iterable[Part]:
    yield Part(
        name="previous",
        config=Previous,
        build="gangline_testkit.toys.previous:PreviousCallback",
        summary="the weights before the newest step",
    )
