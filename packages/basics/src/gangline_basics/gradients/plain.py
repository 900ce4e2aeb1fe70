"""Uncompressed sum, the default reduction of gradients."""

from __future__ import annotations

from torch import Tensor

from gangline.comm.base import Comm, Pending
from gangline.config.schema import Run
from gangline.gradients import Bucket, GradientReduction
from gangline_basics.gradients.config import SumGradients


class PlainSum(GradientReduction):
    """Uncompressed sum: one collective per bucket."""

    def reduce(self, bucket: Bucket, comm: Comm) -> Pending[Tensor]:
        return comm.start_all_reduce(bucket.flat)

    def reduce_scatter(self, bucket: Bucket, comm: Comm) -> Pending[Tensor]:
        return comm.start_reduce_scatter(bucket.flat)


def build(config: SumGradients, run: Run) -> PlainSum:
    """Return the reduction `sum`."""
    return PlainSum()
