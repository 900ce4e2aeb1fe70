"""A tied parameter of the first and the last pipeline stage: the first stage owns it, the last stage has a copy.

Before a step each owner rank sends its range of the weights; after the step the copy sends that range's gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.comm.base import Comms
from gangline.comm.purpose import mark_traffic
from gangline_parallel_megatron_style.data_parallel.param_buffer import ParamBuffer


class TiedCopy:
    """Transfers of weights and gradients between a tied parameter and its copy.

    buffers  the buffers of the tied group on this rank
    stages   the pp ranks that have the tied group, its owner first
    """

    def __init__(self, buffers: list[ParamBuffer], stages: tuple[int, ...], comms: Comms) -> None:
        self.comm, self.stages = comms.get_comm("pp"), stages
        self.shards = [buffer.shard for buffer in buffers]
        self.grads = [buffer.grads for buffer in buffers if buffer.grads is not None]
        self.owns = self.comm.index == stages[0]
        self.alone = len(stages) == 1

    @mark_traffic("weights")
    def send_weights(self) -> None:
        """Send the weights from the owner to the copy."""
        if not self.alone:
            self._send(self.shards, self.stages[0], self.stages[1])

    @mark_traffic("gradients")
    def send_gradients(self) -> None:
        """Send the gradients from the copy to the owner, which adds them to its own gradients."""
        if self.alone:
            return
        totals = [grads.total for grads in self.grads if grads.total is not None]
        if self.owns:
            received = [torch.empty_like(total) for total in totals]
            self._send(received, self.stages[1], self.stages[0])
            for total, more in zip(totals, received, strict=True):
                total.add_(more)
        else:
            self._send(totals, self.stages[1], self.stages[0])

    def _send(self, tensors: list[Tensor], source: int, target: int) -> None:
        if self.comm.index == source:
            self.comm.exchange([(x.contiguous(), target) for x in tensors], [])
        else:
            self.comm.exchange([], [(x, source) for x in tensors])
