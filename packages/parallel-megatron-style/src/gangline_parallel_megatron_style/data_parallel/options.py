"""Options of the flat buffers of a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.gradients import GradientReduction
from gangline.precision import Precision


@dataclass(frozen=True)
class BufferOptions:
    """Options for the storage and reduction of all buffers of a rank.

    zero              ZeRO stage: 1 shards the optimizer state, 2 gradients too, 3 weights too; 0: off
    each_microbatch   whether gradients are reduced after each microbatch, so that no rank stores all full gradients
    reduce_dtype      dtype of gradients during the reduction over the ranks
    reduction         the run's gradient reduction (compression, for example); None: plain collectives
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
        """Allocate `size` zeros for master weights: on the device, or with offload in host memory."""
        if not self.offload:
            return torch.zeros(size, dtype=dtype, device=self.device)
        return self.allocate_host_memory(size, dtype)

    def allocate_host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocate `size` zeros in host memory, pinned if the device is a GPU, so that copies are asynchronous."""
        return torch.zeros(size, dtype=dtype, pin_memory=self.device.type == "cuda")
