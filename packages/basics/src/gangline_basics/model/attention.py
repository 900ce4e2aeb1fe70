"""Self-attention with grouped key and value heads (GQA; Ainslie et al., arXiv 2305.13245).

B batch, T tokens, D model width, H query heads, K key and value heads, C width of a head.
If a strategy shards heads or tokens, H, K and T are the local sizes of this rank, taken from the tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.comm.base import Comm
from gangline.model.build import construct
from gangline.model.calls import AttentionCall
from gangline_basics.model import documents, flex
from gangline_basics.model.attention_backend import use_backend
from gangline_basics.model.decoder_nodes import AttentionNode, SinksNode
from gangline_basics.model.kept_tokens import KeyValues
from gangline_basics.model.last_value_cache import LastValueCache
from gangline_basics.model.reference_attention import attend, make_mask
from gangline_basics.model.rope import rotate_pair
from gangline_basics.model.rope_rates import compute_frequencies

PLAIN = AttentionCall()


@dataclass(frozen=True)
class PlainAttention:
    """Default of the `attention` seam. Layers with equal calls share an instance (`get_plain_attention`) and its masks.

    Raises ValueError for a call with terms beyond the formula of `AttentionCall`.
    """

    computes: AttentionCall = PLAIN
    _cache: LastValueCache = field(default_factory=LastValueCache, repr=False, compare=False)
    _spans: LastValueCache = field(default_factory=LastValueCache, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.computes.beyond:
            raise ValueError(f"the attention of gangline-basics does not support {self.computes.beyond}")

    def __call__(
        self,
        q_BHTC: Tensor,
        k_BKTC: Tensor,
        v_BKTC: Tensor,
        document_BT: Tensor | None,
        position_BT: Tensor,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output that `AttentionCall` defines, (B, H, T, C).

        Without window, soft cap and sinks, fused kernels compute the attention without a mask, for each document if the
        batch has documents. If no such kernel supports the call, FlexAttention computes it on CUDA, and otherwise an
        operator with a mask of documents and windows. With a mask, key and value heads are repeated, because fused
        kernels with a mask do not accept fewer key heads than query heads.
        """
        call = self.computes
        if document_BT is None and call.window is None and call.soft_cap is None and sinks_H is None:
            grouped = q_BHTC.shape[1] > k_BKTC.shape[1]
            return F.scaled_dot_product_attention(
                q_BHTC, k_BKTC, v_BKTC, is_causal=call.causal, scale=call.scale, enable_gqa=grouped
            )
        if document_BT is not None and documents.takes(call, q_BHTC, sinks_H):
            out = documents.attend_documents(q_BHTC, k_BKTC, v_BKTC, document_BT, call, self._spans)
            if out is not None:
                return out
        if call != PLAIN and flex.takes(q_BHTC):
            return flex.attend_in_blocks(q_BHTC, k_BKTC, v_BKTC, document_BT, position_BT, sinks_H, call, self._cache)
        source_BT = position_BT if document_BT is None else document_BT
        key_mask = self._cache("keys", source_BT, lambda: make_mask(call, document_BT, position_BT))
        if call.soft_cap is not None or sinks_H is not None:
            return attend(q_BHTC, k_BKTC, v_BKTC, key_mask, call, sinks_H)
        groups = q_BHTC.shape[1] // k_BKTC.shape[1]
        if groups > 1:
            k_BKTC, v_BKTC = (x.repeat_interleave(groups, dim=1) for x in (k_BKTC, v_BKTC))
        return F.scaled_dot_product_attention(q_BHTC, k_BKTC, v_BKTC, attn_mask=key_mask, scale=call.scale)


@lru_cache(maxsize=64)
def get_plain_attention(call: AttentionCall) -> PlainAttention:
    """Return the shared instance for a call."""
    return PlainAttention(call)


attention = get_plain_attention(PLAIN)


class Sinks(nn.Module):
    """Attention sinks: a learned logit per head in the head's softmax, without a value vector."""

    def __init__(self, node: SinksNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.heads))

    def bind(self, comm: Comm) -> None:
        """Ignore the communicator: sinks are sharded like the heads, so they need no communication."""


class GroupedAttention(nn.Module, ABC):
    """Grouped-query attention, x (B, T, D) -> (B, T, D). Query and key norms, if any, precede the rotation (Qwen3)."""

    attention: Callable[..., Tensor]

    def __init__(self, node: AttentionNode) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = construct(node.wq), construct(node.wk), construct(node.wv)
        self.wo = construct(node.wo)
        self.q_norm = construct(node.q_norm) if node.q_norm else None
        self.k_norm = construct(node.k_norm) if node.k_norm else None
        self.head_dim = node.head_dim
        self.rates = compute_frequencies(node.rope, node.head_dim) if node.rope else ()
        self.magnitude = node.rope.scaling.magnitude if node.rope and node.rope.scaling else 1.0
        self.call = node.call
        self.attention = get_plain_attention(node.call)
        use_backend(node.backend)
        self.sinks = construct(node.sinks) if node.sinks else None

    @abstractmethod
    def forward(self, x_BTD: Tensor, batch: Batch) -> Tensor:
        """Compute the attention: project the queries, `attend`, and project the output."""

    def attend(self, q_BTHC: Tensor, x_BTD: Tensor, batch: Batch) -> Tensor:
        """Return the output of every head, (B, T, H, C), for queries before normalisation and rotation."""
        k_BTKC, v_BTKC = (y.unflatten(-1, (-1, self.head_dim)) for y in (self.wk(x_BTD), self.wv(x_BTD)))
        if self.q_norm is not None:
            q_BTHC = self.q_norm(q_BTHC)
        if self.k_norm is not None:
            k_BTKC = self.k_norm(k_BTKC)
        q, k = q_BTHC.transpose(1, 2), k_BTKC.transpose(1, 2)
        if self.rates:
            q, k = rotate_pair(q, k, batch.position, self.rates, self.magnitude)
        more = () if self.sinks is None else (self.sinks.weight,)
        attention = self.attention
        if batch.cache is not None:
            attention = batch.cache.get(self, partial(KeyValues, self.attention, self.call)).attend
        return attention(q, k, v_BTKC.transpose(1, 2), batch.document, batch.position, *more).transpose(1, 2)


class Attention(GroupedAttention):
    """Attention of most decoders: all rows of `wq` project to queries."""

    def forward(self, x_BTD: Tensor, batch: Batch) -> Tensor:
        q_BTHC = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        return self.wo(self.attend(q_BTHC, x_BTD, batch).flatten(-2))
