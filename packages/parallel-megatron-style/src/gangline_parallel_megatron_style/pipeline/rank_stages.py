"""Interface between the executor of a pipeline and the part of the model on its rank."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gangline_parallel_megatron_style.pipeline.weight_grad_store import WeightGradStore


class RankStages(ABC):
    """All model chunks of one rank. Hidden states have the shape that `allocate_hidden` returns: (B, t, D)."""

    def __init__(self) -> None:
        self.deferred = WeightGradStore()

    @abstractmethod
    def forward(self, chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        """Return the hidden state for the next stage, or on the last stage the loss (0-d).

        hidden: input, a leaf that must not be changed in place; None on the first stage
        """

    @abstractmethod
    def backward(self, chunk: int, microbatch: int, output: Tensor, grad: Tensor | None) -> None:
        """Run autograd's backward from `output`, the result of `forward`, with the output gradient `grad`.

        `grad` is None if `output` is the loss. In action I `deferred` is open: it stores the weight gradients that
        layers defer, until `compute_weight_grads`.
        """

    @abstractmethod
    def allocate_hidden(self, microbatch: int) -> Tensor:
        """Allocate contiguous memory to receive a hidden state of this microbatch, or the gradient of one."""

    def compute_weight_grads(self, chunk: int, microbatch: int) -> None:
        """Compute the weight gradients that `backward` deferred for a chunk and a microbatch."""
        self.deferred.run(chunk, microbatch)
