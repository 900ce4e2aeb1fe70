"""Visibility: the keys of each rank that the queries of one rank see, with zigzag chunks.

Of 2n chunks rank i holds chunk i ("front") and chunk 2n - 1 - i ("back"). With a causal mask, of the keys of rank j

    j = i    queries see earlier keys: the plain causal mask, because the chunks are in order
    j < i    all queries of i see the front of j; no query sees the back of j
    j > i    the queries in the back of i see all keys of j; the queries in the front of i see no key

So with the keys of any other rank, a rank computes half of its queries with all keys, or all queries with half of the
keys. Attention without a causal mask computes all queries with all keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm.base import Comm
from gangline.model.calls import AttentionCall
from gangline_parallel_megatron_style.context import varlen
from gangline_parallel_megatron_style.context.blocks import Kernel, choose_kernel
from gangline_parallel_megatron_style.context.rectangles import find_rectangles, make_rectangle_kernel
from gangline_parallel_megatron_style.context.segments import BlockTokens, group_segments


@dataclass(frozen=True)
class AttentionBlock:
    """This rank's queries from `first` on, with another rank's keys before `end`, all visible unless `causal`."""

    first: int
    end: int
    causal: bool


def make_attention_block(index: int, source: int, tokens: int, causal: bool = True) -> AttentionBlock:
    """Return the block that rank `index` computes with the keys of rank `source`; each rank has `tokens` tokens."""
    if source == index or not causal:
        return AttentionBlock(0, tokens, causal)
    return AttentionBlock(0, tokens // 2, False) if source < index else AttentionBlock(tokens // 2, tokens, False)


class Visibility:
    """Visibility of keys with documents and a window; documents and positions are gathered once for all layers.

    One device-to-host copy of documents and positions tells for each rank whether all, none or some of its keys are
    visible. If no keys are visible, the block is skipped. If some are, the block needs a mask, or a kernel that
    computes documents and windows without a mask. Only the bounds of documents and positions are compared, not single
    keys: if the bounds do not decide, the keys count as partly visible.
    """

    def __init__(self, document_BT: Tensor | None, position_BT: Tensor, call: AttentionCall, comm: Comm) -> None:
        self.index, self.window = comm.index, call.window or 0
        optional_tensors = {"document": document_BT, "position": None if call.window is None else position_BT}
        tensors = {name: x for name, x in optional_tensors.items() if x is not None}
        B, T = next(iter(tensors.values())).shape
        both = torch.stack([x.to(torch.int64) for x in tensors.values()])
        all_ncBT = comm.all_gather(both[None].contiguous()).view(comm.size, len(tensors), B, T)
        self.all = {name: all_ncBT[:, number] for number, name in enumerate(tensors)}
        host_ncBT = all_ncBT.cpu()
        self._host = {name: host_ncBT[:, number] for number, name in enumerate(tensors)}
        flags = []
        for source in range(comm.size):
            block = make_attention_block(comm.index, source, T, call.causal)
            bounds = [self._compare_bounds(name, source, block) for name in self.all]
            flags.append(torch.stack([torch.stack(x).all() for x in zip(*bounds, strict=True)]))
        self._seen: list[list[bool]] = torch.stack(flags).tolist()
        self._kernels: dict[int, Kernel | None] = {}

    def _select(
        self, tensors: dict[str, Tensor], name: str, source: int, block: AttentionBlock
    ) -> tuple[Tensor, Tensor]:
        return tensors[name][self.index][:, block.first :], tensors[name][source][:, : block.end]

    def _compare_bounds(self, name: str, source: int, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """Return two flags: whether any query may see a key, and whether every query sees every key.

        Both follow from the minimum and maximum of `name` (documents or positions) over queries and over keys.
        """
        q, k = self._select(self._host, name, source, block)
        if name == "position":
            return (q.amin(1) - k.amax(1) < self.window).any(), (q.amax(1) - k.amin(1) < self.window).all()
        low, high = torch.maximum(q.amin(1), k.amin(1)), torch.minimum(q.amax(1), k.amax(1))
        one = torch.maximum(q.amax(1), k.amax(1)) == torch.minimum(q.amin(1), k.amin(1))
        return (low <= high).any(), one.all()

    def hides_all(self, source: int) -> bool:
        """Return whether no query of this rank sees a key of rank `source`."""
        return not self._seen[source][0]

    def find_kernel(self, source: int, block: AttentionBlock, q: Tensor) -> Kernel | None:
        """Return a kernel that computes the block without a mask; None: use `make_mask`."""
        if self._seen[source][1]:
            return None
        if source not in self._kernels:
            self._kernels[source] = self._make_kernel(source, block, q)
        return self._kernels[source]

    def _make_kernel(self, source: int, block: AttentionBlock, q: Tensor) -> Kernel | None:
        if varlen.takes(q):
            pairs = {name: self._select(self._host, name, source, block) for name in self._host}
            tensors = (pairs.get(name, (None, None)) for name in BlockTokens._fields)
            sides = zip(*tensors, strict=True)
            queries, keys = (BlockTokens(*(None if x is None else x.numpy() for x in side)) for side in sides)
            groups = group_segments(queries, keys, self.window or None, block.causal)
            rows = q.shape[0]
            tokens, seen_tokens = (x.shape[1] for x in next(iter(pairs.values())))
            return varlen.make_varlen_kernel(groups, (rows, tokens), (rows, seen_tokens), q.device)
        if self.window or q.device.type != "cpu":
            return None
        places = find_rectangles(*self._select(self._host, "document", source, block))
        return None if places is None else make_rectangle_kernel(places, choose_kernel(q, masked=False))

    def make_mask(self, source: int, block: AttentionBlock) -> Tensor | None:
        """Return the mask (B, 1, T, S), which includes causality; None if documents and window hide no key."""
        if self._seen[source][1]:
            return None
        mask: Tensor | None = None
        for name in self.all:
            q_BT, k_BS = self._select(self.all, name, source, block)
            q, k = q_BT[:, None, :, None], k_BS[:, None, None, :]
            one = q == k if name == "document" else q - k < self.window
            mask = one if mask is None else mask & one
        assert mask is not None
        return mask.tril() if block.causal else mask
