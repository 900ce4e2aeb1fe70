"""Ring attention (Liu et al., arXiv 2310.01889): keys and values go round the ranks while blocks are computed.

Each rank keeps its queries. In step s rank i has the keys and values of rank i - s, and sends them to rank i + 1 while
it computes with them. The outputs of blocks are merged by their log-sum-exp:

    lse' = log(exp(lse) + exp(lse_b))       out' = out + sigmoid(lse_b - lse) (out_b - out)

In the backward pass the keys and values go round again, each followed by the sum of its gradients, which ends on the
rank of the keys and values. Sequences are split zigzag (`gangline_parallel_megatron_style.context.cut`), so that all
ranks have equal work. Ring attention supports causal and bidirectional attention, windows and scales, but not soft caps
and sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending
from gangline.model.calls import AttentionCall
from gangline_basics.model.attention import PLAIN
from gangline_basics.model.last_value_cache import LastValueCache
from gangline_parallel_megatron_style.context.blocks import Kernel, choose_kernel
from gangline_parallel_megatron_style.context.supported import explain_unsupported
from gangline_parallel_megatron_style.context.visibility import AttentionBlock, Visibility, make_attention_block


@dataclass(frozen=True)
class RingAttention:
    """Ring attention for the `attention` seam over the ranks of `comm`. Layers with equal calls share one instance.

    Raises ValueError for a call that ring attention does not support.
    """

    comm: Comm
    computes: AttentionCall = PLAIN
    _cache: LastValueCache = field(default_factory=LastValueCache, repr=False)

    def __post_init__(self) -> None:
        if extras := explain_unsupported(self.computes):
            raise ValueError(f"ring attention does not support {extras}")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, document: Tensor | None, position: Tensor) -> Tensor:
        """Return the attention output (B, H, T, C) of this rank's tokens.

        q (B, H, T, C), k and v (B, K, T, C), document (B, T) or None, position (B, T): of this rank's tokens
        """
        visibility, call = None, self.computes
        if document is not None or call.window is not None:
            source = position if document is None else document
            visibility = self._cache(None, source, lambda: Visibility(document, position, call, self.comm))
        return _Ring.apply(q, k, v, visibility, self.comm, call)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility | None, comm: Comm, call: AttentionCall
    ) -> Tensor:
        out = lse = q.new_empty(0)
        for source, block, kv in _iterate_ring(k, v, comm, call.causal):
            if visibility is not None and visibility.hides_all(source):
                continue
            kernel, visible = _choose_block_kernel(q, visibility, source, block)
            arguments = q[:, :, block.first :], kv[0][:, :, : block.end], kv[1][:, :, : block.end]
            part, part_lse = kernel.forward(*arguments, block.causal and visible is None, visible, call.scale)
            if source == comm.index:  # the first block, which has all queries
                out, lse = part.to(part_lse.dtype), part_lse
            else:
                _merge(out[:, :, block.first :], lse[:, :, block.first :], part, part_lse)
        out = out.to(q.dtype)
        ctx.visibility, ctx.comm, ctx.call = visibility, comm, call
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        visibility: Visibility | None = ctx.visibility
        comm: Comm = ctx.comm
        call: AttentionCall = ctx.call
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dkv = lse.new_zeros(2, *k.shape)
        coming: Pending[Sequence[Tensor]] | None = None
        for source, block, kv in _iterate_ring(k, v, comm, call.causal):
            gradients = None
            if visibility is None or not visibility.hides_all(source):
                kernel, visible = _choose_block_kernel(q, visibility, source, block)
                rows, keys = (slice(None), slice(None), slice(block.first, None)), slice(block.end)
                gradients = kernel.backward(
                    dout[rows],
                    q[rows],
                    kv[0][:, :, keys],
                    kv[1][:, :, keys],
                    out[rows],
                    lse[rows],
                    block.causal and visible is None,
                    visible,
                    call.scale,
                )
            if coming is not None:
                (dkv,) = coming.wait()
            if gradients is not None:
                dq[:, :, block.first :] += gradients[0]
                dkv[0][:, :, : block.end] += gradients[1]
                dkv[1][:, :, : block.end] += gradients[2]
            coming = _pass_on(dkv, comm)
        assert coming is not None  # the ring has at least one step
        (dkv,) = coming.wait()
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), None, None, None


def _choose_block_kernel(
    q: Tensor, visibility: Visibility | None, source: int, block: AttentionBlock
) -> tuple[Kernel, Tensor | None]:
    """Return the kernel for a block of the keys of rank `source`, and the mask for it (None: no mask)."""
    by_document = None if visibility is None else visibility.find_kernel(source, block, q)
    if by_document is not None:
        return by_document, None
    visible = None if visibility is None else visibility.make_mask(source, block)
    return choose_kernel(q, visible is not None), visible


def _iterate_ring(k: Tensor, v: Tensor, comm: Comm, causal: bool) -> Iterator[tuple[int, AttentionBlock, Tensor]]:
    """Yield (source rank, block, keys and values (2, B, K, T, C)) of each step of the ring.

    The next keys and values are in transfer while the caller computes with the current ones.
    """
    kv = torch.stack((k, v))
    for step in range(comm.size):
        coming = _pass_on(kv, comm) if step < comm.size - 1 else None
        source = (comm.index - step) % comm.size
        yield source, make_attention_block(comm.index, source, k.shape[2], causal), kv
        if coming is not None:
            (kv,) = coming.wait()


def _pass_on(x: Tensor, comm: Comm) -> Pending[Sequence[Tensor]]:
    """Start to send `x` to the next rank of the ring, and to receive a tensor of equal shape from the previous rank."""
    after, before = (comm.index + 1) % comm.size, (comm.index - 1) % comm.size
    return comm.start_exchange([(x, after)], [(torch.empty_like(x), before)])


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the output and log-sum-exp of a block into `out` and `lse` of the earlier blocks, in place."""
    out.lerp_(part.to(out.dtype), (part_lse - lse).sigmoid_().unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
