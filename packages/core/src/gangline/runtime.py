"""The runtime: a model as a strategy laid it over the mesh, able to run one step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gangline.batch import Batch
    from gangline.comm.base import Comms
    from gangline.config.schema import Run
    from gangline.gradients import GradientReduction
    from gangline.mesh import Mesh
    from gangline.model.compose import Composed
    from gangline.plan import Plan
    from gangline.precision import Precision
    from gangline.shard import Registry, Shard


Why = Literal["length", "end", "stop"]
Stop = Callable[[list[int]], bool]  # whether a text of these tokens is done
Finish = Callable[["nn.Module", str], None]  # (block, its path): recomputation and compilation, in place


class MatrixId(NamedTuple):
    """A matrix by the parameter that it is, or is one of a stack of: leading dims flattened, counted from 0."""

    name: str
    number: int


@dataclass(frozen=True)
class StepResult:
    """What one step came to: global numbers, equal on all ranks but for `own_...`.

    loss_sum      sum of the loss over valid tokens, without emitted terms
    tokens        how many valid tokens that was
    finite        loss and every gradient are finite on all ranks
    metrics       what the modules emitted, reduced: "blocks.3/load" -> number or list of numbers
    own_loss_sum  what this rank itself added to loss_sum, before any reduction; over all ranks these add up to it
    own_tokens    of how many valid tokens that is; 0 on a rank whose tokens' loss another one computes
    """

    loss_sum: float
    tokens: int
    finite: bool
    metrics: dict[str, float | list[float]] = field(default_factory=dict)
    own_loss_sum: float = 0.0
    own_tokens: int = 0


@dataclass(frozen=True)
class ParamShard:
    """One box of a parameter on this rank: a leaf tensor with its `.grad`, and the shard that says which box it is."""

    tensor: torch.Tensor
    shard: Shard


@dataclass(frozen=True)
class ShardedParam:
    """A parameter by its global name and shape, with the boxes of it that this rank holds (perhaps none)."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[ParamShard, ...]


@dataclass(eq=False)
class Job:
    """What a strategy builds a runtime from: a run laid out over ranks, as one rank sees it (not a job of a cluster).

    comms    this rank among the others, with the device that it computes on
    finish   called with each block and its path when the block is cut: recomputation and compilation wrap it
    """

    composed: Composed
    mesh: Mesh
    comms: Comms
    precision: Precision
    finish: Finish

    @property
    def run(self) -> Run:
        return self.composed.run

    @property
    def plan(self) -> Plan:
        return self.composed.plan

    @cached_property
    def model(self) -> nn.Module:
        """The modules of the whole model on the meta device: shapes, and no memory."""
        from gangline.model.build import build_model

        return build_model(self.composed.tree, self.composed.plan)

    @cached_property
    def reduction(self) -> GradientReduction:
        """How the run sums gradients over data-parallel ranks; for strategies with `ParallelConfig.reduces`."""
        from gangline.plugin.registry import build

        reduction: GradientReduction = build(self.run.gradients, self.run)
        return reduction


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How each token is drawn from softmax(logits / temperature), and when a text ends.

    tokens       that are written after each prompt at most
    temperature  0 takes the likeliest token
    top_k        draw from so many of the likeliest alone; None: from all
    top_p        draw from the likeliest that together have this probability (nucleus; arXiv 1904.09751, section 3.1)
    seed         a token is a function of (seed, number of the prompt, tokens written before it) and the probabilities
    ends         tokens that end a text; they are no part of it

    Raises ValueError for what has no meaning.
    """

    tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    ends: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.tokens < 0 or not 0 <= self.temperature < math.inf:
            raise ValueError(f"tokens={self.tokens} and temperature={self.temperature} must be finite and not negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} is no number of tokens to draw from")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]")


@dataclass(frozen=True)
class Written:
    """The tokens after one prompt, and why there are no more: an end token came, a stop string, or enough of them."""

    tokens: list[int]
    why: Why


class Runtime(ABC):
    """Runs a step on the whole mesh. Every method is called by all ranks, in the same order.

    What the optimizer wrote into the pieces is taken up at the runtime's next call.
    """

    registry: Registry  # of the `model/...` arrays, whole and the same on every rank
    rank: int  # this rank's own, global number
    data_coordinate: tuple[int, int]  # (index, width): which share of the global batch this rank reads
    # Axes along which replicas hold different weights, gradients and optimizer state between synchronisations. Pass the
    # same axes to `Registry.of(..., differs)`: the first rank along them is then primary, so a checkpoint holds its
    # values. `evaluate`, `score` and `generate` have to use these values too, on all ranks.
    differs: frozenset[str] = frozenset()

    @abstractmethod
    def step(self, microbatches: Sequence[Batch]) -> StepResult:
        """Forward and backward over this rank's share of the global batch.

        Afterwards each piece's `.grad` is the gradient of (loss + emitted terms) / global token count, reduced over
        the ranks and without any loss scale. Valid tokens are counted before the backward pass.
        """

    @abstractmethod
    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[float, int]:
        """(global loss sum, global token count), without gradients.

        Every rank passes as many microbatches. Their losses are added in global order, whatever the layout, so that
        under `run.deterministic` the sum has the bits of one process that reads microbatches of the same size.
        """

    @abstractmethod
    def score(self, batches: Sequence[Batch], losses_per_sample: int = 1) -> torch.Tensor:
        """(n,) float64, in the host's memory: each sample's log-likelihood in nats, in global order, on all ranks.

        Each rank passes its share, one sample a batch and as many as every other rank; what does not divide is filled
        up with samples whose `get_loss_mask` is empty, and these score 0. The shares follow each other in order of
        `data_coordinate`. Valid targets are summed; in evaluation, without gradients. losses_per_sample: with 1
        the result is (n,); with more the model returns (losses_per_sample,) for a sample, and the result is
        (n, losses_per_sample). Raises ValueError, on all ranks, where the shares differ in length.
        """

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop | None = None
    ) -> list[Written]:
        """What the model writes after each prompt (of at least one token): the same on all ranks and in any layout.

        All ranks pass the same prompts. stop: whether a text of these tokens is done, the same on all ranks.
        Raises UserError, on all ranks, where this strategy does not write.
        """
        from gangline.errors import UserError

        raise UserError(
            f"{type(self).__name__} does not write text during a run.",
            "Its strategy has no `generate`.",
            "gangline sample RUN_DIR writes with the checkpoints of any run.",
        )

    @abstractmethod
    def clip(self, max_norm: float | None) -> float:
        """Scale the gradients so that their global norm is at most `max_norm`; returns the norm before that.

        The norm is that of `.grad` at the time of the call. Raises RuntimeError if a `.grad` was written since `step`,
        and the norm cannot be measured again without other ranks: see `remeasure`.
        """

    def remeasure(self) -> None:
        """Discard the norm that `step` measured, so that `clip` measures again. Called by all ranks.

        Required after a write to `.grad` between `step` and `clip`; core calls it after `Callback.before_clip`.
        """

    @abstractmethod
    def parameters(self) -> list[ShardedParam]:
        """The same names in the same order on all ranks of a stage."""

    def names(self) -> list[str]:
        """Names of all trained parameters, on whatever stage, in the order of one process: the same on all ranks."""
        return [named.name for named in self.parameters()]

    @abstractmethod
    def map_matrices(
        self,
        function: Callable[[torch.Tensor, MatrixId], torch.Tensor],
        inputs: Iterable[tuple[str, Sequence[torch.Tensor]]],
    ) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
        """Map whole matrices, each on one rank of the stage, by a function that gives (m, n) for (m, n) and its id.

        inputs: names of parameters of two dims and more, each with tensors that are cut like its pieces and of their
        dtype (its gradients, a momentum); of a stack (3 dims and more) each matrix is mapped by itself. Gives the same
        names with pieces of what came of them. It takes from `inputs` as it goes, some matrices ahead of what it gives.

        Which rank maps a matrix is the runtime's choice, the same on all ranks. `function` is called once for each
        matrix, on one rank; its result may depend only on the matrix and on state that this rank stores for it. All
        ranks of the stage call `map_matrices` with the same names in the same order, and take all that it gives.
        """

    @abstractmethod
    def find_matrix_owners(self, names: Sequence[str]) -> Mapping[MatrixId, int]:
        """The global rank that maps each matrix of these parameters, on whatever stage: the same on all ranks.

        State of a matrix belongs on this rank: `map_matrices` calls `function` there, as long as each stage gives it
        all of its own names among these, in this order. No communication.
        """

    @abstractmethod
    def shards(self) -> Iterable[Shard]:
        """The `model/...` arrays that this rank holds: master weights and persistent buffers."""

    def local(self) -> tuple[Registry, Iterable[Shard]]:
        """Arrays `local/...` that only this layout can use: all of the run's, and those this rank holds.

        They are saved with the rest. A run that goes on in the same layout gets them back; in another one, or from a
        checkpoint without them, they are zeroed.
        """
        from gangline.shard import Registry

        return Registry(self.registry.mesh), ()

    @abstractmethod
    def finish_update(self) -> None:
        """The optimizer has stepped: call `after_step(totals)` of the modules that have it, with what they emitted."""
