"""Interface between the executor of a pipeline and the part of the model on its rank."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gangline_parallel_megatron_style.pipeline.weight_grad_store import WeightGradStore


class RankStages(ABC):
    """All chunks of one rank. A hidden state has the shape that `allocate_hidden` returns, (B, t, D) in a decoder."""

    def __init__(self) -> None:
        self.deferred = WeightGradStore()

    @abstractmethod
    def forward(self, chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        """Return the hidden state for the next stage, or on the last stage the loss (0-d).

        `hidden` is None on the first stage. It is a leaf that must not be changed in place.
        """

    @abstractmethod
    def backward(self, chunk: int, microbatch: int, output: Tensor, grad: Tensor | None) -> None:
        """Run autograd from `output`, the result of `forward`; `grad` is None if `output` is the loss.

        In action I `deferred` is open, and the weight gradients that layers defer wait for `compute_weight_grads`.
        """

    @abstractmethod
    def allocate_hidden(self, microbatch: int) -> Tensor:
        """Allocate contiguous memory to receive a hidden state of this microbatch, or its gradient."""

    def compute_weight_grads(self, chunk: int, microbatch: int) -> None:
        """Compute the weight gradients that `backward` deferred."""
        self.deferred.run(chunk, microbatch)
