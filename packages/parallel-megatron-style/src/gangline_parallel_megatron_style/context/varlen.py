"""Blocks of ring attention with documents and windows on CUDA, by flash kernels for segments of many lengths (varlen).

The queries of a group of segments are concatenated, and so are their keys. One call of the kernel computes the group;
the outputs of groups are merged by their log-sum-exp, like the blocks of the ring. No tensor has T x S numbers.

B batch, H query heads, K key and value heads, T queries, S keys, C width of a head
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gangline.data.expand import send
from gangline_parallel_megatron_style.context.blocks import CUDA, Kernel, choose_kernel
from gangline_parallel_megatron_style.context.segments import SegmentGroup

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward

# A group whose queries are single tokens makes the kernel return its log-sum-exp in another order.
SHORTEST = 2


class Packed(NamedTuple):
    """A group of segments on a device.

    queries, keys            int64 vectors: places of the tokens in (B · T) and (B · S); None: all, in order
    query_bounds, key_bounds (segments + 1,) int32: first token of each segment among the concatenated, and the end
    longest_query, longest_key  upper bounds of the lengths; longest_key >= longest_query, because a kernel with `left`
                                and without a bound on the right hides keys that are more than longest_key to the right
    """

    queries: Tensor | None
    keys: Tensor | None
    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    left: int


def takes(q: Tensor) -> bool:
    """Return whether the flash kernel for segments supports queries with the device, dtype and width of `q`."""
    return torch.version.hip is None and choose_kernel(q, masked=False) is CUDA


def make_varlen_kernel(
    groups: Sequence[SegmentGroup], queries: tuple[int, int], keys: tuple[int, int], device: torch.device
) -> Kernel:
    """Make a kernel for the segments of one block with (B, T) queries and (B, S) keys.

    The results are in float32 at least. The kernel ignores its arguments `causal` and `visible`.
    """
    calls = [_pack(group, queries, keys, device) for group in groups]

    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, visible: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        flat_q, flat_k, flat_v = (_flatten_rows(x) for x in (q, k, v))
        out = flat_q.new_zeros(flat_q.shape, dtype=wide)
        lse = flat_q.new_full(flat_q.shape[:2], -torch.inf, dtype=wide)
        for call in calls:
            taken = _take(flat_q, call.queries), _take(flat_k, call.keys), _take(flat_v, call.keys)
            part, part_lse, *_ = _forward(
                *taken, *_list_bounds(call), 0.0, call.causal, False, scale=scale, **_get_window(call)
            )
            part_lse = part_lse.mT.to(wide)
            lse_before = _take(lse, call.queries)
            weight = (part_lse - lse_before).sigmoid().unsqueeze(-1)
            _put(out, call.queries, _take(out, call.queries).lerp(part.to(wide), weight))
            _put(lse, call.queries, torch.logaddexp(lse_before, part_lse))
        return _split_rows(out, q), lse.unflatten(0, (q.shape[0], -1)).transpose(1, 2).contiguous()

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        visible: Tensor | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat_dout, flat_q, flat_out = (_flatten_rows(x) for x in (dout, q, out))
        flat_k, flat_v = _flatten_rows(k), _flatten_rows(v)
        flat_lse = lse.transpose(1, 2).flatten(0, 1)
        dq, dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (flat_q, flat_k, flat_v))
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state of the unused dropout
        for call in calls:
            gradients = _backward(
                *(_take(flat_dout, call.queries), _take(flat_q, call.queries)),
                *(_take(flat_k, call.keys), _take(flat_v, call.keys), _take(flat_out, call.queries)),
                _take(flat_lse, call.queries).mT.contiguous(),
                *_list_bounds(call),
                0.0,
                call.causal,
                unused,
                unused,
                scale=scale,
                **_get_window(call),
            )
            places = call.queries, call.keys, call.keys
            for total, place, gradient in zip((dq, dk, dv), places, gradients, strict=True):
                _put(total, place, _take(total, place) + gradient)
        return _split_rows(dq, q), _split_rows(dk, k), _split_rows(dv, v)

    return Kernel(forward, backward)


def _pack(group: SegmentGroup, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Packed:
    ranges = [(one.row * queries[1] + one.query, one.row * queries[1] + one.query_end) for one in group.segments]
    key_ranges = [(one.row * keys[1] + one.key, one.row * keys[1] + one.key_end) for one in group.segments]
    longest = max(SHORTEST, _find_longest(ranges))
    return Packed(
        _list_places(ranges, queries, device),
        _list_places(key_ranges, keys, device),
        _make_bounds(ranges, device),
        _make_bounds(key_ranges, device),
        longest,
        max(longest, _find_longest(key_ranges)),
        group.causal,
        group.left,
    )


def _find_longest(ranges: list[tuple[int, int]]) -> int:
    return max(stop - start for start, stop in ranges)


def _list_places(ranges: list[tuple[int, int]], size: tuple[int, int], device: torch.device) -> Tensor | None:
    """Return the places in the ranges as a tensor; None if the ranges are all (rows · tokens) places, in order."""
    places = np.concatenate([np.arange(start, stop) for start, stop in ranges])
    if np.array_equal(places, np.arange(size[0] * size[1])):
        return None
    return send(torch.from_numpy(places), device)


def _make_bounds(ranges: list[tuple[int, int]], device: torch.device) -> Tensor:
    ends = np.cumsum([stop - start for start, stop in ranges])
    return send(torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)), device)


def _list_bounds(call: Packed) -> tuple[Tensor, Tensor, int, int]:
    return call.query_bounds, call.key_bounds, call.longest_query, call.longest_key


def _get_window(call: Packed) -> dict[str, int]:
    return {"window_size_left": call.left, "window_size_right": 0 if call.causal else -1}


def _flatten_rows(x_BHTC: Tensor) -> Tensor:
    """Return (B · T, H, C) with stride 1 in the last dim."""
    flat = x_BHTC.transpose(1, 2).flatten(0, 1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _split_rows(flat: Tensor, like: Tensor) -> Tensor:
    """Return (B, H, T, C) of (B · T, H, C)."""
    return flat.unflatten(0, (like.shape[0], -1)).transpose(1, 2)


def _take(x: Tensor, places: Tensor | None) -> Tensor:
    return x if places is None else x.index_select(0, places)


def _put(x: Tensor, places: Tensor | None, values: Tensor) -> None:
    """Write `values` to the places, of which no two are equal."""
    if places is None:
        x.copy_(values)
    else:
        x.index_copy_(0, places, values)
