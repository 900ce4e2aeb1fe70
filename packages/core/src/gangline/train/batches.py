"""From the data cursor to microbatches: which samples a rank reads, and how they become tensors.

Step k reads samples [cursor, cursor + global_size), whatever the layout; the rank at `index` of `width` reads a
contiguous share of them, in microbatches of `micro_size`.
"""

from __future__ import annotations

import numpy as np
import torch

from gangline.batch import Batch
from gangline.data.base import DataSource, Sample


def collate(samples: list[Sample], numbers: list[int], step: int, counted: int | None = None) -> Batch:
    """Stack samples into a Batch; only the first `counted` rows (all by default) count in the loss."""
    tokens = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64, copy=False))
    B, T = tokens.shape[0], tokens.shape[1] - 1
    if any("loss_mask" in sample for sample in samples):
        ones = np.ones(T, dtype=bool)
        mask = torch.from_numpy(
            np.stack([sample.get("loss_mask", ones) for sample in samples]).astype(bool, copy=False)
        )
    else:
        mask = torch.ones(B, T, dtype=torch.bool)
    if counted is not None and counted < B:
        mask[max(0, counted) :] = False
    if any("position" in sample for sample in samples):
        places = np.arange(T)
        position = torch.from_numpy(np.stack([s.get("position", places) for s in samples]).astype(np.int64, copy=False))
    else:
        position = torch.arange(T).expand(B, T)
    document = None
    if any("document" in sample for sample in samples):
        alone = np.zeros(T, dtype=np.int64)
        document = torch.from_numpy(np.stack([s.get("document", alone) for s in samples]).astype(np.int64, copy=False))
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=mask,
        position=position,
        sample=torch.tensor(numbers, dtype=torch.int64),
        document=document,
        step=step,
    )


class Batches:
    """This rank's share of every global batch."""

    def __init__(
        self, source: DataSource, global_size: int, micro_size: int, coordinate: tuple[int, int], device: torch.device
    ) -> None:
        self.source, self.global_size, self.micro_size, self.device = source, global_size, micro_size, device
        self.index, self.width = coordinate
        self.share = global_size // self.width
        if self.share * self.width != global_size or self.share % micro_size:
            raise ValueError(
                f"{global_size} samples do not divide into {self.width} shares of microbatches of {micro_size}"
            )

    def take(self, cursor: int, step: int) -> list[Batch]:
        """The microbatches of the step that reads from sample `cursor` on."""
        first = cursor + self.index * self.share
        return [
            self._load(list(range(start, start + self.micro_size)), step)
            for start in range(first, first + self.share, self.micro_size)
        ]

    def held_out(self, count: int) -> list[Batch]:
        """This rank's share of the first `count` samples, or of all if there are fewer, filled up with empty rows.

        The same samples under every layout, and the same number of microbatches on every rank.
        """
        length = self.source.length()
        count = count if length is None else min(count, length)
        rows = -(-count // (self.width * self.micro_size)) * self.micro_size
        first = self.index * rows
        return [
            self._load([min(i, count - 1) for i in range(start, start + self.micro_size)], 0, counted=count - start)
            for start in range(first, first + rows, self.micro_size)
        ]

    def _load(self, numbers: list[int], step: int, counted: int | None = None) -> Batch:
        batch = collate([self.source.sample(i) for i in numbers], numbers, step, counted)
        if self.device.type == "cpu":
            return batch
        for name in ("tokens", "targets", "loss_mask", "position", "sample", "document"):
            tensor = getattr(batch, name)
            if tensor is not None:
                setattr(batch, name, tensor.contiguous().pin_memory())
        return batch.to(self.device)
