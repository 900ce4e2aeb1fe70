"""The runtime: contract of a model that a strategy has sharded over the mesh: steps, validation and generation."""

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
Stop = Callable[[list[int]], bool]  # (generated tokens) -> whether the text is done
Finish = Callable[["nn.Module", str], None]  # (block, path): adds recomputation and compilation in place


class MatrixId(NamedTuple):
    """Id of a matrix: name of the parameter, and number (from 0) of the matrix in it, with leading dims flattened."""

    name: str
    number: int


@dataclass(frozen=True)
class StepResult:
    """Result of one step: global numbers, equal on all ranks; `own_...` are of this rank."""

    loss_sum: float  # sum of the loss over valid tokens, without loss terms that modules emit (`emit_loss`)
    tokens: int  # number of valid tokens
    finite: bool  # whether the loss and every gradient are finite on all ranks
    # metrics that modules emit, reduced over ranks: "blocks.3/load" -> number or list of numbers
    metrics: dict[str, float | list[float]] = field(default_factory=dict)
    own_loss_sum: float = 0.0  # this rank's share of loss_sum, before any reduction
    own_tokens: int = 0  # number of valid tokens of own_loss_sum; 0 on a rank whose loss another rank computes


@dataclass(frozen=True)
class ParamShard:
    """One box of a parameter on this rank: a leaf tensor with its `.grad`, and the shard with its offset."""

    tensor: torch.Tensor
    shard: Shard


@dataclass(frozen=True)
class ShardedParam:
    """A parameter by its global name and shape, with the boxes that this rank holds (possibly none)."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[ParamShard, ...]


@dataclass(eq=False)
class Job:
    """Input of a strategy that builds a runtime: a run laid out over ranks, as one rank sees it (not a cluster job).

    comms    process groups of this rank, with its device
    finish   function that the strategy calls with each block and its path after it has sharded the block: wraps the
             block in recomputation and compilation
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
        """Complete model on the meta device: shapes without memory."""
        from gangline.model.build import build_model

        return build_model(self.composed.tree, self.composed.plan)

    @cached_property
    def reduction(self) -> GradientReduction:
        """Reduction that sums gradients over data-parallel ranks; for strategies with `ParallelConfig.reduces`."""
        from gangline.gradients import CheckedReduction
        from gangline.plugin.registry import build, installed

        offer = installed().find_part(self.run.gradients)
        return CheckedReduction(f"{offer.distribution}/{offer.part.name}", build(self.run.gradients, self.run))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of text generation: how each token is drawn from softmax(logits / temperature), and when a text ends.

    Raises ValueError for values out of range.
    """

    tokens: int  # maximum number of tokens generated after each prompt
    temperature: float = 0.0  # divisor of the logits; 0: take the likeliest token (greedy decoding)
    top_k: int | None = None  # number of likeliest tokens to draw from; None: all tokens
    # probability mass of the likeliest tokens to draw from (nucleus; arXiv 1904.09751, section 3.1); None: all tokens
    top_p: float | None = None
    seed: int = 0  # seed of the draws; a draw is a function of (seed, prompt number, number of tokens generated before)
    ends: frozenset[int] = field(default_factory=frozenset)  # end tokens: the first one ends the text, and is left out

    def __post_init__(self) -> None:
        if self.tokens < 0 or not 0 <= self.temperature < math.inf:
            raise ValueError(f"tokens={self.tokens} and temperature={self.temperature} must be finite and not negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")


@dataclass(frozen=True)
class Written:
    """Tokens generated after one prompt, and why the text ended: an end token, a stop string, or its maximum length."""

    tokens: list[int]
    why: Why


class Runtime(ABC):
    """Contract of a runtime, which runs steps on the complete mesh. All ranks call every method, in the same order.

    The optimizer writes `ParamShard.tensor` in place. `step`, `evaluate`, `score` and `generate` first copy the new
    values to the weights that the modules compute with.
    """

    registry: Registry  # all `model/...` arrays, equal on every rank
    rank: int  # global number of this rank
    data_coordinate: tuple[int, int]  # (index, count): this rank reads share `index` of `count` of the global batch
    # axes along which replicas hold different weights, gradients and optimizer state between synchronisations. Pass the
    # same axes to `Registry.of(..., differs)`: the first rank along the axes is then primary, so a checkpoint holds the
    # values of that rank. `evaluate`, `score` and `generate` must use the first rank's values, on every rank.
    differs: frozenset[str] = frozenset()

    @abstractmethod
    def step(self, microbatches: Sequence[Batch]) -> StepResult:
        """Run forward and backward over this rank's share of the global batch.

        Afterwards the `.grad` of each `ParamShard.tensor` is the gradient of (loss + emitted terms) / global token
        count, reduced over the ranks and without any loss scale. Valid tokens are counted before the backward pass.
        """

    @abstractmethod
    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[float, int]:
        """Return (global loss sum, global token count), without gradients.

        Every rank passes the same number of microbatches. The microbatch losses are added in global order under every
        layout: with `run.deterministic` the sum is bitwise equal to that of one process with the same microbatch size.
        """

    @abstractmethod
    def score(self, batches: Sequence[Batch], losses_per_sample: int = 1) -> torch.Tensor:
        """Return each sample's log-likelihood in nats, in global order, on all ranks: (n,) float64 on the host.

        Each rank passes its share of the samples, one sample per batch; all shares have the same length, padded with
        samples whose `loss_mask` is all false, which score 0. Shares are concatenated in order of `data_coordinate`.
        A score sums over valid targets, in evaluation mode, without gradients. losses_per_sample: with 1 the result is
        (n,); with k > 1 the model returns k losses per sample, and the result is (n, k), each loss negated.
        Raises ValueError, on all ranks, if the shares differ in length.
        """

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop | None = None
    ) -> list[Written]:
        """Return the tokens after each prompt (of at least one token): equal on all ranks and in any layout.

        All ranks pass the same prompts. stop(generated tokens) returns whether the text is done, equal on all ranks.
        Raises UserError, on all ranks, if this strategy cannot generate.
        """
        from gangline.errors import UserError

        raise UserError(
            f"{type(self).__name__} cannot generate text during a run.",
            "The parallel strategy of this run does not implement `generate`.",
            "To generate text from a checkpoint of any run:  gangline sample RUN_DIR",
        )

    @abstractmethod
    def clip(self, max_norm: float | None) -> float:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before scaling.

        max_norm: None: measure without scaling. The norm is of `.grad` at the time of the call. Raises RuntimeError if
        a `.grad` was written after `step` without `remeasure`, unless this rank can measure alone.
        """

    def remeasure(self) -> None:
        """Discard the gradient norm that `step` measured, so that `clip` measures it again. Called by all ranks.

        Required after a write to `.grad` between `step` and `clip`; core calls it after `Callback.before_clip`.
        """

    @abstractmethod
    def parameters(self) -> list[ShardedParam]:
        """Return the trained parameters: the same names in the same order on all ranks of a stage."""

    def names(self) -> list[str]:
        """Return the names of all stages' trained parameters, in the order of a single process: equal on all ranks."""
        return [parameter.name for parameter in self.parameters()]

    @abstractmethod
    def map_matrices(
        self,
        function: Callable[[torch.Tensor, MatrixId], torch.Tensor],
        inputs: Iterable[tuple[str, Sequence[torch.Tensor]]],
    ) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
        """Apply `function`, ((m, n) tensor, id) -> (m, n) tensor, to full matrices, each on one rank of the stage.

        inputs: (name of a parameter of two or more dims, tensors sharded like the parameter's pieces and of the same
        dtype: gradients, a momentum); of 3 or more dims, each (m, n) matrix is mapped separately. Yields the same
        names with the pieces of the results. Consumes `inputs` lazily, with a prefetch of a few matrices.

        The runtime chooses the rank that maps a matrix; all ranks know the choice. `function` is called once for each
        matrix; its result may depend only on the matrix and on state that this rank stores for the matrix. All ranks of
        the stage call `map_matrices` with the same names in the same order, and must exhaust the iterator.
        """

    @abstractmethod
    def find_matrix_owners(self, names: Sequence[str]) -> Mapping[MatrixId, int]:
        """Return matrix -> global rank that maps it, for these parameters of all stages: equal on all ranks.

        Store the optimizer state of a matrix on that rank: `map_matrices` calls `function` there, if each stage passes
        exactly its own parameters of `names`, in this order. Does not communicate.
        """

    @abstractmethod
    def shards(self) -> Iterable[Shard]:
        """Return the `model/...` arrays that this rank holds: master weights and persistent buffers."""

    def local(self) -> tuple[Registry, Iterable[Shard]]:
        """Return the arrays `local/...`, which only this layout can use: (registry of all ranks, shards of this rank).

        A checkpoint stores these arrays too. A resume under the same layout loads the arrays; under another layout, or
        from a checkpoint without the arrays, they are set to zero.
        """
        from gangline.shard import Registry

        return Registry(self.registry.mesh), ()

    @abstractmethod
    def finish_update(self) -> None:
        """Call `after_step(totals)` of each `StepListener` module. Called after each step of the optimizer."""
