"""Options of the flat buffers of a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.gradients import GradientReduction
from gangline.precision import Precision


@dataclass(frozen=True)
class BufferOptions:
    """How all buffers of a rank are stored.

    zero              ZeRO stage: 1 shards the optimizer state, 2 gradients too, 3 weights too; 0: off
    each_microbatch   whether sharded gradients are reduced after each microbatch, so that no rank stores all gradients
    reduce_dtype      dtype of gradients while they are reduced over the ranks
    reduction         the run's reduction of gradients; None: plain collectives
    offload           whether master weights, and so the optimizer and its state, are in host memory
    """

    precision: Precision
    device: torch.device
    zero: int
    each_microbatch: bool
    reduce_dtype: torch.dtype
    reduction: GradientReduction | None = None
    offload: bool = False

    def allocate_master_weights(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocate `size` zeros for master weights; in pinned host memory if they are offloaded from a GPU."""
        if not self.offload:
            return torch.zeros(size, dtype=dtype, device=self.device)
        return self.allocate_host_memory(size, dtype)

    def allocate_host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocate `size` zeros in host memory, pinned if the device is a GPU, so that copies are asynchronous."""
        return torch.zeros(size, dtype=dtype, pin_memory=self.device.type == "cuda")
