"""Compressed sums of gradients over ranks: 16 bits per element, or about one bit with error feedback.

Each rank owns one range of the elements. A rank encodes its gradients and sends each range to its owner. The owner
decodes the range of every rank and sums them in rank order, in the dtype of the gradients, never in the encoded dtype.
For an all-reduce, owners then encode the sums of their ranges and all-gather them.

With error feedback (Tang et al., DoubleSqueeze, arXiv 1905.05957; 1-bit Adam, arXiv 2102.02888, algorithm 1) each
encoding error is added to the input of the next step: the worker error to a rank's gradients, and the server error to
the sum of the range that the rank owns. 1-bit Adam compresses Adam's momentum after its warm-up; here the gradient is
compressed, so that any optimizer can be used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending
from gangline.comm.ordered import Later, sum_rows
from gangline.config.schema import Run
from gangline.gradients import Bucket, BucketLayout, GradientReduction
from gangline_basics.gradients.codec import Bfloat16, GradCodec, Signs
from gangline_basics.gradients.config import RoundedGradients, SignGradients

WORKER, SERVER = "worker", "server"


class CodedSum(GradientReduction):
    """Sum of gradients encoded by a codec. Error feedback stores up to two arrays, padded to full chunks of the codec.

    worker  (n, m)  encoding error of this rank's gradients, one row for each owner of a range
    server  (1, m)  encoding error of the sum that this rank owns; only for all-reduce
    """

    def __init__(self, codec: GradCodec, start_step: int = 0) -> None:
        self.codec, self.start_step = codec, start_step

    def get_array_shapes(self, layout: BucketLayout) -> dict[str, tuple[int, ...]]:
        if not self.codec.feedback:
            return {}
        row = self._count_row(layout)
        shapes: dict[str, tuple[int, ...]] = {WORKER: (layout.ranks, row)}
        return shapes if layout.scatters else {**shapes, SERVER: (1, row)}

    def reduce(self, bucket: Bucket, comm: Comm) -> Pending[Tensor]:
        if bucket.step < self.start_step:
            return comm.start_all_reduce(bucket.flat)
        flat = bucket.flat
        length = -(-flat.numel() // comm.size)
        padded = torch.nn.functional.pad(flat, (0, length * comm.size - flat.numel()))

        def gather(total: Tensor) -> Tensor:
            code = self._encode(total.view(1, -1), bucket.state.get(SERVER))
            parts = self.codec.decode(comm.all_gather(code), flat.dtype)[:, :length]
            return flat.copy_(parts.reshape(-1)[: flat.numel()])

        return self._sum_range(bucket, padded.view(comm.size, length), comm, gather)

    def reduce_scatter(self, bucket: Bucket, comm: Comm) -> Pending[Tensor]:
        if bucket.step < self.start_step:
            return comm.start_reduce_scatter(bucket.flat)
        length = bucket.flat.numel() // comm.size
        return self._sum_range(bucket, bucket.flat.view(comm.size, length), comm, lambda total: total[:length])

    def _sum_range(self, bucket: Bucket, parts_ns: Tensor, comm: Comm, then: Callable[[Tensor], Tensor]) -> Later:
        """Start to sum the range that this rank owns; `then` receives the sum, (m,)."""
        padded = torch.nn.functional.pad(parts_ns, (0, self._count_row(bucket.layout) - parts_ns.shape[1]))
        code = self._encode(padded, bucket.state.get(WORKER))
        arrived = comm.start_all_to_all(code)
        return Later(arrived, lambda every: then(sum_rows(self.codec.decode(every, bucket.flat.dtype))))

    def _count_row(self, layout: BucketLayout) -> int:
        """Return the number of elements of a rank's range, rounded up to full chunks."""
        return -(-layout.size // (layout.ranks * self.codec.multiple)) * self.codec.multiple

    def _encode(self, x_nm: Tensor, error: Tensor | None) -> Tensor:
        if error is None:
            return self.codec.encode(x_nm)
        total_nm = x_nm + error
        code = self.codec.encode(total_nm)
        torch.sub(total_nm, self.codec.decode(code, total_nm.dtype), out=error)
        return code


def build_rounded(config: RoundedGradients, run: Run) -> CodedSum:
    """Return the reduction `bf16`."""
    return CodedSum(Bfloat16())


def build_signs(config: SignGradients, run: Run) -> CodedSum:
    """Return the reduction `onebit`."""
    return CodedSum(Signs(), config.start_step)
