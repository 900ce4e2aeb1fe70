"""Sections of a run next to its parts: `run`, `batch` and `validate`. Torch-free.

Users type the names of these fields (``batch.global_size=64``), so do not rename them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from annotated_types import IsFinite, Predicate

from gangline.config.ranges import NonNegativeInt, PositiveInt


class Recompute(Enum):
    """Activation checkpointing: which activations the backward pass recomputes instead of storing them."""

    none = "none"
    selective = "selective"
    full = "full"


@dataclass
class RunSection:
    """Options of the run itself: directory, seed, length, device, activation checkpointing."""

    name: Annotated[str, Predicate(str.isprintable)] = "run"  # name of the run, at the end of its directory's name
    dir: str | None = None  # run directory; null: runs/<date>-<time>-<name>
    seed: IsFinite[int] = 0  # random seed of initial weights, data order and all other random numbers
    steps: PositiveInt = 300  # optimizer steps
    deterministic: bool = False  # deterministic kernels, sums in rank order: bitwise reproducible, slower
    device: str | None = None  # torch device, such as cpu or cuda:1; null: a GPU if there is one
    recompute: Recompute = Recompute.none  # activation (gradient) checkpointing: none, selective (attention), full
    recompute_every: PositiveInt = 1  # block interval of activation checkpointing: one of every n blocks is recomputed
    loss_chunk: PositiveInt | None = None  # tokens per chunk of logits in the loss, recomputed in backward; null: all
    compile: bool = False  # torch.compile of each block
    sample: NonNegativeInt = 200  # sample text at the end of the run, in tokens; 0: none
    save_on_signal: bool = True  # checkpoint on SIGTERM or Ctrl-C, before the run ends at the step boundary
    weights: str | None = None  # run directory or checkpoint with initial weights and optimizer state; null: none


@dataclass
class BatchSection:
    """Batch sizes of a step. global_size = micro_size x accumulation x data-parallel width."""

    global_size: PositiveInt = 16  # global batch size: sequences per step over all ranks
    ramp: dict[PositiveInt, PositiveInt] = field(default_factory=dict)  # batch size ramp {size: end sample}: {4: 8000}
    micro_size: PositiveInt | None = (
        None  # microbatch size: sequences per forward pass of a rank; null: its full share, or less with a pipeline
        # (gradient accumulation is global_size / (micro_size x data-parallel ranks))
    )
    sequence_length: PositiveInt = 128  # context length: tokens per sequence

    def list_sizes(self) -> list[int]:
        """Return the global batch sizes of the run in the order in which they are used."""
        return [size for size, _ in self._list_stages()] + [self.global_size]

    def get_size(self, cursor: int) -> int:
        """Return the number of sequences in the step that begins at sample `cursor`, which alone determines it."""
        return next((size for size, until in self._list_stages() if cursor < until), self.global_size)

    def compute_cursor(self, steps: int) -> int:
        """Return the number of the first sample after `steps` steps, if no sample is skipped."""
        cursor, rest = 0, steps
        for size, until in self._list_stages():
            stage_steps = min(rest, -(-max(0, until - cursor) // size))
            cursor, rest = cursor + stage_steps * size, rest - stage_steps
        return cursor + rest * self.global_size

    def _list_stages(self) -> list[tuple[int, int]]:
        return sorted(self.ramp.items(), key=lambda stage: stage[1])


@dataclass
class ValidateSection:
    """Validation loss on the run's held-out data and on further sets, each the run's data part with other options.

    null removes a set of a recipe, or of a run that is resumed.
    """

    every: PositiveInt | None = 100  # validation interval in steps; null: no validation
    samples: PositiveInt = 64  # validation sequences per set, rounded up to full microbatches
    sets: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # extra sets by name: {code: {path: src}}


SECTIONS = {"run": RunSection, "batch": BatchSection, "validate": ValidateSection}
