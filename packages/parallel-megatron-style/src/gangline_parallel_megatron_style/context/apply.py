"""Putting ring attention or Ulysses in the places that a plan names."""

from __future__ import annotations

from typing import Literal

from torch import nn

from gangline.comm import Comm
from gangline.model.recall import Recall
from gangline.plan import Plan, matches
from gangline_parallel_megatron_style.context.cut import Order
from gangline_parallel_megatron_style.context.ring import RingAttention
from gangline_parallel_megatron_style.context.ulysses import UlyssesAttention

Method = Literal["ring", "ulysses"]
ORDERS: dict[Method, Order] = {"ring": "zigzag", "ulysses": "contiguous"}  # how each wants sequences cut


def set_attention(model: nn.Module, plan: Plan, comm: Comm, method: Method) -> None:
    """Set the `attention` seam of every module that the plan names; nothing on one rank.

    Ring attention takes the seam's place, Ulysses wraps what is there.
    """
    if comm.size == 1:
        return
    patterns = [seam.pattern for seam in plan.seams if seam.name == "attention"]
    ring, recall = RingAttention(comm), Recall()
    for path, module in model.named_modules():
        if hasattr(module, "attention") and any(matches(pattern, path) for pattern in patterns):
            inner = module.attention
            if isinstance(inner, nn.Module):  # the block above, whose attribute of that name is the layer
                continue
            module.attention = ring if method == "ring" else UlyssesAttention(comm, inner, recall)
