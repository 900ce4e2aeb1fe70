"""Installation of ring attention or Ulysses at the attention seams that a plan names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor, nn

from gangline import UserError
from gangline.comm.base import Comm
from gangline.model.calls import AttentionCall, Call, call_of
from gangline.model.contracts import get_seam_function
from gangline.model.untraced import untraced
from gangline.plan import Plan, matches, names
from gangline_basics.model.last_value_cache import LastValueCache
from gangline_basics.model.seams import call_at
from gangline_parallel_megatron_style.context.cut import TokenOrder
from gangline_parallel_megatron_style.context.ring import RingAttention
from gangline_parallel_megatron_style.context.supported import explain_unsupported
from gangline_parallel_megatron_style.context.ulysses import UlyssesAttention

Method = Literal["ring", "ulysses"]
ORDERS: dict[Method, TokenOrder] = {"ring": "zigzag", "ulysses": "contiguous"}  # `order` of `cut_tokens`


def set_attention(
    model: nn.Module, plan: Plan, comm: Comm, method: Method, declared: Mapping[str, Call | None]
) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
    """Set the `attention` seam of every module that the plan names; return (module, replaced function) pairs.

    Returns [] on one rank. Ring attention replaces the function and computes the declared call
    (`gangline_basics.model.seams.get_calls`); Ulysses wraps the function, and calls it with some of the heads. Raises
    UserError if the function is undeclared or differs from its node's declaration, if ring attention does not support
    the call, and if a module that the plan names has no `attention` seam.
    """
    if comm.size == 1:
        return []
    patterns = [seam.pattern for seam in plan.seams if seam.name == "attention"]
    rings: dict[AttentionCall, RingAttention] = {}
    attentions: list[tuple[nn.Module, Callable[..., Tensor]]] = []
    cache, attention_paths = LastValueCache(), list[str]()
    modules = {path: m for path, m in model.named_modules() if any(matches(pattern, path) for pattern in patterns)}
    for path, module in modules.items():
        inner = get_seam_function(module, "attention")
        if inner is None:
            continue
        call = _match_call(path, inner, call_at(declared, path), method)
        attentions.append((module, inner))
        over_ranks: Callable[..., Tensor] = UlyssesAttention(comm, inner, cache)
        if method == "ring":
            over_ranks = rings.setdefault(call, RingAttention(comm, call))
        module.attention = untraced(over_ranks)
        attention_paths.append(path)
    for path in modules:
        named = any(names(pattern, path) for pattern in patterns)
        if named and not any(one == path or one.startswith(f"{path}.") for one in attention_paths):
            raise UserError(
                f"{path} has no function `attention`, which the plan names as the seam of context parallelism.",
                "With parallel.cp above 1 this module would attend only to the tokens of its own rank.",
                "Use parallel.cp=1.",
            )
    return attentions


def _match_call(path: str, function: object, declared: Call | None, method: Method) -> AttentionCall:
    """Return the call that `function` computes.

    Raises UserError unless the function and its node declare the same call, and the method supports the call.
    """
    own = call_of(function)
    if isinstance(own, AttentionCall) and own == declared and not (method == "ring" and explain_unsupported(own)):
        return own
    takes = "ring attention would replace" if method == "ring" else "Ulysses would pass some of the heads to"
    raise UserError(
        f"{path}: {takes} a function whose attention is {'not declared' if own is None else own}.",
        f"The node of {path} declares: {'no attention' if declared is None else declared}.",
        "Declare the same attention in the node's `get_seams` and the function's `computes`, or use parallel.cp=1.",
    )
