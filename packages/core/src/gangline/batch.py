"""The batch: tokens, targets and further tensors of one microbatch, which every stage of a model may read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gangline.model.cache import Cache


@dataclass
class Batch:
    """One microbatch of B sequences of T tokens.

    tokens     (B, T) int64    inputs
    targets    (B, T) int64    next token of each input
    loss_mask  (B, T) bool     targets that count in the loss
    position   (B, T) int64    position of the token within its document
    document   (B, T) int64    number of the document within the sequence; None: the data does not separate documents
    padding    (B, T) bool     tokens that are padding; None: no padding
    sample     (B,)   int64    global sample number
    ends       (n,)   int32    in host memory: ends of the documents of all rows, b·T + e, ascending, including the end
                               of every row; None: unknown
    extra      further tensors (B, ...) by name, from the data source; replicated on every rank
    step       step of the batch, which with sample and position is the key of every random draw
    cache      decoding cache, in which modules store state of earlier tokens; None: the batch has all tokens
    valid      number of targets that count, if the host knows it for a batch on a device; None: sum `loss_mask`
    rows       if ranks hold shards of each row (context parallelism): (the batch with all tokens, the function that
               returns this rank's shard of a (B, T) tensor); None: this rank has full rows
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    position: torch.Tensor
    sample: torch.Tensor
    document: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    step: int = 0
    valid: int | None = None
    ends: torch.Tensor | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    cache: Cache | None = None
    rows: tuple[Batch, Callable[[torch.Tensor], torch.Tensor]] | None = None

    def shift_targets(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token `count` positions after each target, int64, and whether it counts in the loss, bool: (B, T).

        A token past the end of the row, or of another document, does not count. `shift_targets(0)` returns
        targets and loss_mask.
        """
        if not count:
            return self.targets, self.loss_mask
        whole, own = (self, None) if self.rows is None else self.rows
        targets, counts = whole.targets.roll(-count, 1), whole.loss_mask.roll(-count, 1)
        counts[:, -count:] = False
        if whole.document is not None:
            counts &= whole.document == whole.document.roll(-count, 1)
        return (targets, counts) if own is None else (own(targets), own(counts))

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on `device`; a copy from pinned memory does not block.

        Sets `valid` before a copy from the CPU to a device: counting on the device would make the host wait.
        """
        arguments = {}
        for item in fields(self):
            value = getattr(self, item.name)
            stays = item.name == "ends" or not hasattr(value, "to")
            arguments[item.name] = value if stays else value.to(device, non_blocking=True)
        arguments["extra"] = {name: x.to(device, non_blocking=True) for name, x in self.extra.items()}
        there = Batch(**arguments)
        if self.loss_mask.device.type == "cpu" and there.loss_mask.device.type != "cpu":
            there.valid = int(self.loss_mask.sum())
        return there

    @property
    def shape(self) -> torch.Size:
        return self.tokens.shape
