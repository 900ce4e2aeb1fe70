"""Sections `run`, `batch`, `validate` of a run. Do not rename fields: users type their names. Torch-free."""

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

    name: Annotated[str, Predicate(str.isprintable)] = "run"  # name of the run, suffix of its default directory
    dir: str | None = None  # run directory; null: runs/<date>-<time>-<name>
    seed: IsFinite[int] = 0  # random seed of initial weights, data order and all other random numbers
    steps: PositiveInt = 300  # length of the run in optimizer steps
    deterministic: bool = False  # deterministic kernels, sums in rank order: bitwise reproducible but slower
    device: str | None = None  # torch device of the ranks, such as cpu or cuda:1; null: a GPU if available
    recompute: Recompute = Recompute.none  # activation checkpointing of blocks: none, selective (attention only), full
    recompute_every: PositiveInt = 1  # activation checkpointing interval in blocks: every n-th block is recomputed
    loss_chunk: PositiveInt | None = None  # chunked loss: tokens per chunk; backward recomputes logits; null: no chunks
    compile: bool = False  # compilation of each block by torch.compile
    gc_every: PositiveInt | None = 50  # Python garbage collection interval in steps, on all ranks; null: automatic
    sample: NonNegativeInt = 200  # length of the text generated at the end of the run, in tokens; 0: no text
    save_on_signal: bool = True  # checkpoint on SIGTERM or Ctrl-C, at the step boundary at which the run stops
    weights: str | None = None  # run directory or checkpoint that gives initial weights and optimizer state; null: none


@dataclass
class BatchSection:
    """Batch sizes of a step. global_size = micro_size x accumulation x data-parallel width."""

    global_size: PositiveInt = 16  # global batch size: sequences per step over all ranks
    # batch size ramp: {global batch size: number of the sample at which its stage ends}, such as {4: 8000}
    ramp: dict[PositiveInt, PositiveInt] = field(default_factory=dict)
    # microbatch size: sequences per forward pass of a rank; null: global_size / data-parallel ranks, or less with
    # pipeline parallelism. Gradient accumulation steps: global_size / (micro_size x data-parallel ranks)
    micro_size: PositiveInt | None = None
    sequence_length: PositiveInt = 128  # context length: tokens per sequence

    def list_sizes(self) -> list[int]:
        """Return the global batch sizes of the run in order of use: the sizes of the ramp, then `global_size`."""
        return [size for size, _ in self._list_stages()] + [self.global_size]

    def get_size(self, cursor: int) -> int:
        """Return the global batch size of the step that begins at sample `cursor`; it depends on the cursor alone."""
        return next((size for size, until in self._list_stages() if cursor < until), self.global_size)

    def compute_cursor(self, steps: int) -> int:
        """Return the number of the sample at which step `steps` (from 0) begins, if no sample is skipped."""
        cursor, rest = 0, steps
        for size, until in self._list_stages():
            stage_steps = min(rest, -(-max(0, until - cursor) // size))
            cursor, rest = cursor + stage_steps * size, rest - stage_steps
        return cursor + rest * self.global_size

    def _list_stages(self) -> list[tuple[int, int]]:
        return sorted(self.ramp.items(), key=lambda stage: stage[1])


@dataclass
class ValidateSection:
    """Validation loss on the run's held-out data and on extra sets, each the run's data part with other options.

    A set with the value null is removed: a recipe or a resumed run may define it.
    """

    every: PositiveInt | None = 100  # validation interval in steps; null: no validation
    samples: PositiveInt = 64  # number of validation sequences per set, rounded up to full microbatches
    # extra validation sets: name -> options that differ from the run's data part, such as {code: {path: src}}
    sets: dict[str, dict[str, Any] | None] = field(default_factory=dict)


SECTIONS = {"run": RunSection, "batch": BatchSection, "validate": ValidateSection}
