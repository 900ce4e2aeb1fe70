"""Sums over ranks whose parts travel compressed: 16 bits an element, or about one with error feedback.

A rank encodes what it has and sends each peer its range; the owner of a range decodes all parts, adds them up in rank
order, in the dtype of the gradients, never in that of the wire. Where all want the whole, owners encode the sums and
hand them round. With error feedback (Tang et al., DoubleSqueeze, arXiv 1905.05957; 1-bit Adam, arXiv 2102.02888,
algorithm 1) what encoding lost is added to what is encoded next: the worker's error of a rank's part, the server's of
the sum that it owns. 1-bit Adam compresses Adam's momentum after its warm-up; here it is the gradient, so that any
optimizer can follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending, Reduction
from gangline.comm.ordered import Later, sum_rows
from gangline.comm.wrap import Wrapped
from gangline_parallel_megatron_style.data_parallel.grad_codec import GradCodec
from gangline_parallel_megatron_style.data_parallel.grad_reducer import GradReducer


@dataclass
class Switch:
    """Whether what is sent now is compressed: shared by all sums of a rank."""

    on: bool = True


class Compressed(Wrapped):
    """Its `all_reduce` and `reduce_scatter` are those of one buffer of `size` elements; all else goes as it is.

    worker  (n, m)  what encoding lost of this rank's parts, one row for each owner
    server  (1, m)  what encoding lost of the sums this rank owns
    """

    def __init__(self, inner: Comm, codec: GradCodec, switch: Switch, size: int, like: Tensor, whole: bool) -> None:
        super().__init__(inner)
        self.codec, self.switch = codec, switch
        self.row = row_of(size, inner.size, codec)
        self.worker = like.new_zeros(inner.size, self.row) if codec.feedback else None
        self.server = like.new_zeros(1, self.row) if codec.feedback and whole else None

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        if not self.switch.on:
            return self.inner._reduce_scatter(x, background)
        length = x.numel() // self.size
        return self._summed(x.view(self.size, length), x.dtype, lambda total: total[:length])

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        if op != "sum" or not self.switch.on:
            return self.inner._all_reduce(x, op, background)
        length = -(-x.numel() // self.size)
        padded = torch.nn.functional.pad(x.view(-1), (0, length * self.size - x.numel()))

        def hand_round(total: Tensor) -> Tensor:
            code = self._encode(total.view(1, -1), self.server)
            every = self.inner.all_gather(code)
            parts = self.codec.decode(every, x.dtype)[:, :length]
            return x.copy_(parts.reshape(-1)[: x.numel()].view_as(x))

        return self._summed(padded.view(self.size, length), x.dtype, hand_round)

    def errors(self) -> Iterator[tuple[str, Tensor]]:
        """What must be kept for a run to go on as it would have."""
        if self.worker is not None:
            yield "worker", self.worker
        if self.server is not None:
            yield "server", self.server

    def _summed(self, parts_ns: Tensor, dtype: torch.dtype, then) -> Later:
        """Then is called with this rank's (m,) of the sum."""
        padded = torch.nn.functional.pad(parts_ns, (0, self.row - parts_ns.shape[1]))
        code = self._encode(padded, self.worker)
        arrived = self.inner.start_all_to_all(code)
        return Later(arrived, lambda every: then(sum_rows(self.codec.decode(every, dtype))))

    def _encode(self, x_nm: Tensor, error: Tensor | None) -> Tensor:
        if error is None:
            return self.codec.encode(x_nm)
        wanted = x_nm + error
        code = self.codec.encode(wanted)
        torch.sub(wanted, self.codec.decode(code, wanted.dtype), out=error)
        return code


def row_of(size: int, ranks: int, codec: GradCodec | type[GradCodec]) -> int:
    """Elements of each rank's range of a buffer of `size`, in whole chunks."""
    return -(-size // (ranks * codec.multiple)) * codec.multiple


def compressed(reducer: GradReducer, size: int, codec: GradCodec, switch: Switch, like: Tensor) -> GradReducer:
    """The reducer of one buffer of `size`, compressed between replicas, where links are slow, else between shards."""
    if reducer.replicas.size > 1:
        length = -(-size // reducer.shard.size)
        slow = Compressed(reducer.replicas, codec, switch, length, like, whole=True)
        return replace(reducer, replicas=slow, joint=None)
    if reducer.shard.size > 1:
        fast = Compressed(reducer.shard, codec, switch, size, like, whole=not reducer.cut)
        return replace(reducer, shard=fast, joint=None)
    return reducer
