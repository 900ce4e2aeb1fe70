"""What the executor of a pipeline asks of the part of the model that lies on its rank."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gangline_parallel_megatron_style.pipeline.weight_grad_store import WeightGradStore


class RankStages(ABC):
    """All the chunks of one rank. A hidden state is whatever shape `allocate_hidden` gives, (B, t, D) in a decoder."""

    def __init__(self) -> None:
        self.deferred = WeightGradStore()

    @abstractmethod
    def forward(self, chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        """The hidden state that goes to the next stage, or, on the last one, the loss (0-d).

        `hidden` is None on the first stage. It is a leaf that must not be changed in place.
        """

    @abstractmethod
    def backward(self, chunk: int, microbatch: int, output: Tensor, grad: Tensor | None) -> None:
        """Run autograd from `output`, which `forward` gave; without `grad` it is the loss.

        In action I `deferred` is open, and the weight gradients that layers defer wait for `compute_weight_grads`.
        """

    @abstractmethod
    def allocate_hidden(self, microbatch: int) -> Tensor:
        """Contiguous memory into which a hidden state of this microbatch, or its gradient, can be received."""

    def compute_weight_grads(self, chunk: int, microbatch: int) -> None:
        """Compute the weight gradients that `backward` deferred."""
        self.deferred.run(chunk, microbatch)
