"""What core does to each block once a strategy has cut it: recomputation, then compilation.

Both replace `forward` on the instance, so parameter names stay and a strategy's own hooks stay outside the compiled
call (a hook that resizes storage inside it breaks the graph).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gangline import inside
from gangline.config.schema import Recompute

Finish = Callable[[nn.Module, str], None]


def finisher(recompute: Recompute, compile: bool) -> Finish:
    """A function (block, path) that finishes a block in place; what the block emits goes under `path`."""

    def finish(block: nn.Module, path: str) -> None:
        # The path must be known while the forward is recomputed, so it is set innermost; outside what is compiled.
        forward = block.forward if compile else _at(block.forward, path)
        if recompute is Recompute.full:
            forward = _recomputed(forward)
        block.forward = _at(torch.compile(forward), path) if compile else forward

    return finish


def _recomputed(forward: Callable) -> Callable:
    def recomputed(hidden, batch):
        if not torch.is_grad_enabled():
            return forward(hidden, batch)
        return checkpoint(forward, hidden, batch, use_reentrant=False, preserve_rng_state=False)

    return recomputed


def _at(forward: Callable, path: str) -> Callable:
    def located(hidden, batch):
        with inside.at(path):
            return forward(hidden, batch)

    return located
