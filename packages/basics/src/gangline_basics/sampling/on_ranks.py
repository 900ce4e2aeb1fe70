"""Text generation on all ranks, with the sharded model of a parallel strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from gangline.comm.base import Comm
from gangline.comm.objects import gather_json
from gangline.model.tree import Node
from gangline.runtime import Sampling, Stop, Written
from gangline_basics.model.seams import list_recomputed
from gangline_basics.sampling.decode import Forward, decode


def keeps(tree: Node) -> bool:
    """Return whether all modules of a model declare how they decode one token (`Node.get_decoding`)."""
    return not list_recomputed(tree)


@contextmanager
def prepare_model(model: nn.Module) -> Iterator[None]:
    """Run the block with `model` in evaluation mode, without gradients, and with compiled code run eagerly.

    Compiled code would be recompiled for each length of a text.
    """
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train()


def share_writing(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    cached: bool,
    comm: Comm,
    device: torch.device,
    stop: Stop | None,
) -> list[Written]:
    """Generate this rank's share of the texts, and return all texts; each rank of `comm` has the complete model."""
    first, last = (len(prompts) * index // comm.size for index in (comm.index, comm.index + 1))
    own_texts = decode(forward, prompts[first:last], sampling, cached=cached, device=device, stop=stop, first=first)
    parts = gather_json(comm, [[one.tokens, one.why] for one in own_texts])
    return [Written(tokens, why) for part in parts for tokens, why in part]
