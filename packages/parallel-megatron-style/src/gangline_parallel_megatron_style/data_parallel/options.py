"""How the buffers of a rank are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.gradients import GradientReduction
from gangline.precision import Precision


@dataclass(frozen=True)
class BufferOptions:
    """How all buffers of a rank are kept.

    zero              what is cut: 1 the optimizer state, 2 gradients too, 3 weights too (0: nothing)
    each_microbatch   gradients that are cut are added over the ranks that cut them after each microbatch, so that no
                      rank keeps all of them
    reduce_dtype      dtype of gradients as they are added over the ranks
    reduction         how they are added over the ranks; None: by plain collectives
    offload           master weights, and so the optimizer and its state, are in host memory
    """

    precision: Precision
    device: torch.device
    zero: int
    each_microbatch: bool
    reduce_dtype: torch.dtype
    reduction: GradientReduction | None = None
    offload: bool = False

    def allocate_master_weights(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many numbers that the optimizer steps; pinned where they are copied to a GPU."""
        if not self.offload:
            return torch.zeros(size, dtype=dtype, device=self.device)
        return self.allocate_host_memory(size, dtype)

    def allocate_host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory for so many numbers, to and from which a GPU copies while the host goes on."""
        return torch.zeros(size, dtype=dtype, pin_memory=self.device.type == "cuda")
