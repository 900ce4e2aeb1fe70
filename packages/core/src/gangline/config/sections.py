"""What is said of a run beside its parts: `run`, `batch` and `validate`. Torch-free.

The names here are what users type (``batch.global_size=64``), so they stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from annotated_types import IsFinite, Predicate

from gangline.config.ranges import NonNegativeInt, PositiveInt


class Recompute(Enum):
    """Which activations are computed again in the backward pass instead of kept."""

    none = "none"
    selective = "selective"
    full = "full"


@dataclass
class RunSection:
    """The run itself."""

    name: Annotated[str, Predicate(str.isprintable)] = "run"  # for people: it ends the directory's name
    dir: str | None = None  # null: runs/<date>-<time>-<name>
    seed: IsFinite[int] = 0  # weights, the order of data and every other draw follow from it
    steps: PositiveInt = 300  # optimizer steps
    deterministic: bool = False  # sums over ranks in rank order, deterministic kernels: slower, reproducible to the bit
    device: str | None = None  # null: a GPU where there is one
    recompute: Recompute = Recompute.none  # activation (gradient) checkpointing: none, selective (attention), full
    recompute_every: PositiveInt = 1  # of every n blocks one is recomputed
    loss_chunk: PositiveInt | None = None  # tokens that the loss has logits of at a time, computed twice; null: all
    compile: bool = False  # torch.compile, block by block
    sample: NonNegativeInt = 200  # tokens to write from the finished model; 0: none
    save_on_signal: bool = True  # SIGTERM or Ctrl-C: save a checkpoint at the step boundary, then end
    weights: str | None = None  # run directory, or checkpoint in one, to begin with: its weights and optimizer state


@dataclass
class BatchSection:
    """How much data a step sees. global_size = micro_size x accumulation x data-parallel width."""

    global_size: PositiveInt = 16  # sequences a step, over all ranks
    ramp: dict[PositiveInt, PositiveInt] = field(default_factory=dict)  # smaller ones, each until a sample: {4: 8000}
    micro_size: PositiveInt | None = (
        None  # sequences per forward pass of a rank; null: its whole share, or less with a pipeline; gradient
        # accumulation is global_size / (micro_size x data-parallel ranks)
    )
    sequence_length: PositiveInt = 128  # tokens

    def list_sizes(self) -> list[int]:
        """The global batches of the run, in the order in which they come."""
        return [size for size, _ in self._list_stages()] + [self.global_size]

    def get_size(self, cursor: int) -> int:
        """Sequences of the step that begins at sample `cursor`: a function of it alone."""
        return next((size for size, until in self._list_stages() if cursor < until), self.global_size)

    def compute_cursor(self, steps: int) -> int:
        """The first sample behind so many steps, where none is passed over."""
        cursor, rest = 0, steps
        for size, until in self._list_stages():
            stage_steps = min(rest, -(-max(0, until - cursor) // size))
            cursor, rest = cursor + stage_steps * size, rest - stage_steps
        return cursor + rest * self.global_size

    def _list_stages(self) -> list[tuple[int, int]]:
        return sorted(self.ramp.items(), key=lambda stage: stage[1])


@dataclass
class ValidateSection:
    """Loss on held-out data: the run's own, and further sets, each the run's data part with other options.

    null takes a set away: from a recipe's, or when a run goes on.
    """

    every: PositiveInt | None = 100  # steps; null: never
    samples: PositiveInt = 64  # sequences of each set, rounded up to whole microbatches
    sets: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # more sets by name: {code: {path: src}}


SECTIONS = {"run": RunSection, "batch": BatchSection, "validate": ValidateSection}
