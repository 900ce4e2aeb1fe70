"""Recomputation and compilation of each block, after a strategy has sharded it.

Both replace `forward` on the instance, so parameter names do not change and a strategy's hooks run outside of the
compiled call (a hook inside that resizes storage would break the graph).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gangline.config.sections import Recompute
from gangline.model import forward_context
from gangline.model.contracts import get_seam_function, get_seam_module
from gangline.model.untraced import keep_out
from gangline.plan import Seam, matches, parse_block_number
from gangline.runtime import Finish


def make_finish(recompute: Recompute, compile: bool, every: int = 1, seams: Sequence[Seam] = ()) -> Finish:
    """Return a function (block, path) that finishes a block in place; values that the block emits go under `path`.

    Only blocks whose number (the last in the path) is a multiple of `every` are recomputed: in full, or (selective)
    only between queries, keys and values and the output of attention, at the attention seams in `seams` (Korthikanti et
    al., arXiv 2205.05198, section 5).
    """
    if compile:
        keep_out()

    def finish(block: nn.Module, path: str) -> None:
        chosen = parse_block_number(path) % every == 0
        if chosen and recompute is Recompute.selective:
            _recompute_attention(block, path, seams)
        # The path must be set while the forward is recomputed, so it is set innermost; but outside of compiled code.
        forward = block.forward if compile else _locate(block.forward, path)
        if chosen and recompute is Recompute.full:
            forward = _recompute(forward)
        block.forward = _locate(torch.compile(forward), path) if compile else forward

    return finish


def _recompute_attention(block: nn.Module, path: str, seams: Sequence[Seam]) -> None:
    for name, module in block.named_modules(prefix=path):
        if not any(seam.name == "attention" and matches(seam.pattern, name) for seam in seams):
            continue
        attention = get_seam_function(module, "attention")
        inner = get_seam_module(module, "attention")
        if attention is not None:
            module.attention = _recompute(attention)
        elif inner is not None:
            inner.forward = _recompute(inner.forward)


def _recompute(forward: Callable) -> Callable:
    def run_recomputed(*inputs):
        if not torch.is_grad_enabled():
            return forward(*inputs)
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)

    return run_recomputed


def _locate(forward: Callable, path: str) -> Callable:
    def run_located(hidden, batch):
        with forward_context.emit_under(path):
            return forward(hidden, batch)

    return run_located
