"""The batch: what every stage of a model may look at."""

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
    targets    (B, T) int64    what comes next
    loss_mask  (B, T) bool     which targets count
    position   (B, T) int64    of the token within its document
    document   (B, T) int64    number of the document within the sequence, or None where the data doesn't separate them
    padding    (B, T) bool     which tokens only fill their row up; None: none does
    sample     (B,)   int64    global sample number
    ends       (n,)   int32    in the host's memory: where the documents of all rows, one after another, end (b·T + e,
                               ascending, every row's end among them); None: nobody counted
    extra      further tensors (B, ...) by name, as the data source gives them: every rank has them whole
    step       the step this batch belongs to: with sample and position the key of every random draw
    cache      where modules keep what they need of earlier tokens, while a text is written; None: all tokens are here
    valid      how many targets count, where the host knows it of a batch on another device; None: sum loss_mask
    rows       where the tokens of a row are spread over ranks: the batch with all of them, and what takes this rank's
               of (B, T); None: all are here
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
        """Return the token `count` places after each target, and whether it counts: int64 and bool, (B, T) each.

        A token past the end of the row, or in another document, does not count. `shift_targets(0)` returns targets and
        loss_mask.
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
        """The same batch on `device`; from pinned memory the copy does not block.

        What leaves the host is counted first: later the host would have to wait for the device to learn of it.
        """
        moved = {}
        for item in fields(self):
            value = getattr(self, item.name)
            stays = item.name == "ends" or not hasattr(value, "to")
            moved[item.name] = value if stays else value.to(device, non_blocking=True)
        moved["extra"] = {name: x.to(device, non_blocking=True) for name, x in self.extra.items()}
        there = Batch(**moved)
        if self.loss_mask.device.type == "cpu" and there.loss_mask.device.type != "cpu":
            there.valid = int(self.loss_mask.sum())
        return there

    @property
    def shape(self) -> torch.Size:
        return self.tokens.shape
