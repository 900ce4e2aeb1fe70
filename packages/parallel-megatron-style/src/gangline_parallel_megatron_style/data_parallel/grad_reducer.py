"""Reduction of a flat gradient buffer over the ranks that hold equal parameters; each rank gets the sum of its range.

n ranks shard the buffer (ZeRO; Rajbhandari et al., arXiv 1910.02054), and there are R replicas of the group of n ranks:

    default              reduce-scatter over the n shards, then all-reduce of each range over the R replicas, so the
                         slower links between replicas carry only 1/n of the buffer
    run.deterministic    one sum in rank order over all R·n ranks: each rank sums 1/R of a range, then the R replicas
                         all-gather the range

If every microbatch is reduced over the n shards, the replicas all-reduce the accumulated sums only once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending
from gangline.comm.ordered import Later
from gangline.comm.purpose import mark_traffic
from gangline.comm.solo import Done


@dataclass(frozen=True)
class GradReducer:
    """The ranks that reduce the gradients of one group of arrays.

    shard      the n ranks that shard the buffer; the index in this group is the index of the range
    replicas   the R ranks that have the same range
    joint      all R·n ranks, replicas slowest, if the sum must be in rank order over all ranks; else None
    cut        whether each rank keeps only its range; if not, every rank keeps the full buffer (ZeRO stage 0)
    """

    shard: Comm
    replicas: Comm
    joint: Comm | None = None
    cut: bool = True

    @property
    def parts(self) -> int:
        return self.shard.size if self.cut else 1

    @property
    def size(self) -> int:
        return self.shard.size * self.replicas.size

    @property
    def leaves_replicas(self) -> bool:
        """Return whether `reduce` sums over the shard ranks alone, so that `all_reduce_replicas` must follow."""
        return self.cut and self.joint is None and self.shard.size > 1 and self.replicas.size > 1

    @mark_traffic("gradients")
    def all_reduce_replicas(self, part: Tensor) -> Pending[Tensor]:
        """Start to sum `part` over the replicas. `part`: result of `reduce`, or sum of several results; overwritten."""
        return self.replicas.start_all_reduce(part)

    @mark_traffic("gradients")
    def reduce(self, flat: Tensor) -> Pending[Tensor]:
        """Start to sum the buffers `flat` (parts · s,) of all ranks; the result is the sum (s,) of this rank's range.

        If `leaves_replicas`, the sum is over the shard ranks alone. The reduction may overwrite `flat`, so callers must
        not use `flat` after the call.
        """
        if self.size == 1:
            return Done(flat)
        if self.joint is not None and self.cut and self.shard.size > 1 and self.replicas.size > 1:
            return self._reduce_in_order(flat, self.joint)
        if self.joint is not None and not self.cut:
            return self.joint.start_all_reduce(flat)
        if self.shard.size == 1:
            return self.replicas.start_all_reduce(flat)
        if not self.cut:
            return self._reduce_in_two_levels(flat)
        return self.shard.start_reduce_scatter(flat)

    def _reduce_in_two_levels(self, flat: Tensor) -> Pending[Tensor]:
        """Start a two-level all-reduce: its slow level, over the replicas, sends only 1/n of the buffer."""
        if self.replicas.size == 1:
            return self.shard.start_all_reduce(flat)
        padding = -flat.numel() % self.shard.size
        rows = torch.nn.functional.pad(flat, (0, padding)) if padding else flat

        def finish_all_reduce(part: Tensor) -> Tensor:
            return self.shard.all_gather(self.all_reduce_replicas(part).wait())[: flat.numel()]

        return Later(self.shard.start_reduce_scatter(rows), finish_all_reduce)

    def _reduce_in_order(self, flat: Tensor, joint: Comm) -> Pending[Tensor]:
        n, R = self.shard.size, self.replicas.size
        length = flat.numel() // n
        ranges = flat.view(n, length)
        padding = -length % R
        if padding:
            ranges = torch.nn.functional.pad(ranges, (0, padding))
        parts = ranges.view(n, R, -1).transpose(0, 1).reshape(-1)

        def gather_range(part: Tensor) -> Tensor:
            return self.replicas.all_gather(part)[:length]

        return Later(joint.start_reduce_scatter(parts), gather_range)
