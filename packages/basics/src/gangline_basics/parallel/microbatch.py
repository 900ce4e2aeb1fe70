"""Forward pass of one microbatch through a complete model: embedding, blocks, head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.forward_context import Collected, Frame
from gangline.plan import Plan


class WholeModel:
    """The embedding, blocks and head that a plan names, called in order."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.embed = model.get_submodule(plan.embed)
        self.blocks = tuple(model.get_submodule(plan.blocks).children())
        self.head = model.get_submodule(plan.head)

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the loss summed over the valid targets of a batch, 0-d."""
        hidden = self.embed(batch)
        for block in self.blocks:
            hidden = block(hidden, batch)
        return self.head(hidden, batch)

    def compute_last_logits(self, batch: Batch) -> Tensor:
        """Return the logits of the token that follows each row, (B, V)."""
        hidden = self.embed(batch)
        for block in self.blocks:
            hidden = block(hidden, batch)
        head: Any = self.head
        return head.compute_logits(hidden[:, -1:])[:, -1]


def make_frame(batch: Batch, microbatch: int, seed: int, collected: Collected | None) -> Frame:
    """Return the forward context of one microbatch; callers set its coefficient before its backward pass."""
    return Frame(
        microbatch=microbatch,
        seed=seed,
        step=batch.step,
        sample=batch.sample[:, None].expand(batch.shape),
        document=batch.document,
        position=batch.position,
        loss_mask=batch.loss_mask,
        padding=batch.padding,
        collected=collected,
    )


def count_tokens(microbatches: Sequence[Batch], device: torch.device) -> Tensor:
    """Return the number of unmasked targets in the microbatches, int64 of shape (1,)."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for batch in microbatches:
        total += batch.loss_mask.sum()
    return total


def count_on_host(microbatches: Sequence[Batch]) -> Tensor:
    """Return `count_tokens` in the host's memory, so that reading the sum over ranks does not wait for a device.

    A batch whose targets were counted before the copy to the device (`Batch.valid`) is not counted again.
    """
    counts = [int(batch.loss_mask.sum()) if batch.valid is None else batch.valid for batch in microbatches]
    return torch.tensor([sum(counts)], dtype=torch.int64)
