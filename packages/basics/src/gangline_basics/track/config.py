"""Configurations of the built-in trackers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline.config.ranges import PositiveInt
from gangline.config.schema import TrackConfig
from gangline.plugin.parts import Part


@dataclass
class Console(TrackConfig):
    """Progress line on a terminal, and periodic lines of text everywhere."""

    every: PositiveInt | None = None  # interval between log lines, in steps; null: about 30 lines per run


@dataclass
class JsonLines(TrackConfig):
    """metrics.jsonl: every record in full, one JSON object per line."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    path: str | None = None  # output file; null: metrics.jsonl in the run directory
    figure: bool = True  # loss plot, loss.svg, drawn at the end of a run if matplotlib is installed


@dataclass
class TensorBoard(TrackConfig):
    """Curves for TensorBoard: numbers as scalars, vectors as histograms."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    path: str | None = None  # output directory; null: tensorboard/ in the run directory


def format_tensorboard_command(config: TensorBoard, directory: str) -> str:
    """Return the command that shows the curves of the run in `directory`."""
    return f"tensorboard --logdir {config.path or directory}"


PARTS = (
    Part(
        name="console",
        config=Console,
        build="gangline_basics.track.console:build",
        default=True,
        summary="progress line with the remaining time on a terminal, plain lines elsewhere",
    ),
    Part(
        name="jsonl",
        config=JsonLines,
        build="gangline_basics.track.jsonl:build",
        capabilities={"figure": "gangline_basics.runs.run_figure:draw_at_end"},
        default=True,
        summary="metrics.jsonl: one record per step, floats in full precision",
    ),
    Part(
        name="tensorboard",
        config=TensorBoard,
        build="gangline_basics.track.tensorboard:build",
        capabilities={"curves": "gangline_basics.track.config:format_tensorboard_command"},
        default=True,
        summary="curves for TensorBoard",
    ),
)
