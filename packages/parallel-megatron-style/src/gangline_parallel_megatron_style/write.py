"""Text generation with a model that is sharded along every axis.

Every rank takes part in every token. Stages pass the hidden state on as in an evaluation, heads and features stay
sharded over tp, and weights that are sharded over the data ranks are gathered as in any forward pass. Sequence and
context parallelism are off, because a step generates one token: every rank of tp and cp has all tokens. All data ranks
generate all texts.

B batch, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.comm.base import Comm
from gangline_parallel_megatron_style.components import Components
from gangline_parallel_megatron_style.pipeline.stage import Stage
from gangline_parallel_megatron_style.tensor.loss import VocabularyLoss


@contextmanager
def gather_sequences(made: Components, stages: list[Stage]) -> Iterator[None]:
    """Turn off sequence and context parallelism inside the block: ranks have all tokens, the head returns logits."""
    setting, cut = made.setting, made.setting is not None and made.setting.sequence_parallel
    over: list[tuple[Any, Any]] = [(module, module.attention) for module, _ in made.attentions]
    try:
        if setting is not None:
            setting.sequence_parallel = False
        for module, own in made.attentions:
            module.attention = own  # type: ignore[assignment]
        for stage in stages:
            stage.writes = True
        yield
    finally:
        if setting is not None:
            setting.sequence_parallel = cut
        for module, replaced in over:
            module.attention = replaced
        for stage in stages:
            stage.writes = False


def broadcast_logits(made: Components, logits: list[Tensor]) -> Tensor:
    """Broadcast the logits (B, V) to every rank, from the ranks with the head; join the vocabulary shards of tp."""
    pp, tp = made.comms.get_comm("pp"), made.comms.get_comm("tp")
    heads = [segment.module for stage in made.stages for segment in stage if segment.kind == "head"]
    own_logits = logits[0].double() if logits else None
    if own_logits is not None and heads and isinstance(heads[0].loss, VocabularyLoss):
        own_logits = _join(own_logits, tp)
    if pp.size == 1:
        assert own_logits is not None
        return own_logits
    shape = torch.tensor(
        [0, 0] if own_logits is None else list(own_logits.shape), dtype=torch.int64, device=made.comms.device
    )
    shape = pp.all_reduce(shape)
    if own_logits is None:
        own_logits = torch.zeros(*shape.tolist(), dtype=torch.float64, device=made.comms.device)
    return pp.all_reduce(own_logits)


def _join(part_BV: Tensor, tp: Comm) -> Tensor:
    """Return the logits (B, V) joined from the shards of all tp ranks; the last shards may be shorter, or empty."""
    sizes = tp.all_gather(torch.tensor([part_BV.shape[1]], dtype=torch.int64, device=part_BV.device)).tolist()
    padded_VB = F.pad(part_BV, (0, max(sizes) - part_BV.shape[1])).t().contiguous()
    parts = tp.all_gather(padded_VB).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).t().contiguous()
