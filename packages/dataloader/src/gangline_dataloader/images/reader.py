"""The reader of `data=dali_images`: a DALI pipeline in a thread decodes the images of complete steps in advance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from gangline.data.read_ahead import ReadAhead
from gangline.data.reader import BatchReader, ReadPlace, StoredBatch
from gangline_dataloader.images.decode import ImageDecoder

if TYPE_CHECKING:
    from gangline_dataloader.images.source import ImageSource

AHEAD = 2  # prefetch depth in steps


class ImageReader(BatchReader):
    """Batch reader that returns the samples of `ImageSource.sample`, with equal bytes and in the run's order."""

    def __init__(self, source: ImageSource, place: ReadPlace) -> None:
        self.source, self.place = source, place
        self._ahead: ReadAhead[list[StoredBatch]] | None = None
        self._closed = False

    def begin(self, cursor: int, step: int) -> None:
        self._refuse_closed()
        if self._ahead is not None:
            self._ahead.close()
        place, decoder = self.place, ImageDecoder(self.source.config.side, self.place.share)

        def read(n: int, slot: int) -> list[StoredBatch]:
            first = place.find_first(cursor + n * place.global_size)
            whole = self._fill(decoder, range(first, first + place.share))
            return [_slice_batch(whole, at, at + place.micro_size) for at in range(0, place.share, place.micro_size)]

        self._ahead = ReadAhead(read, AHEAD + 1)

    def take(self) -> Sequence[StoredBatch]:
        if self._ahead is None:
            raise RuntimeError("this reader is closed" if self._closed else "`begin` comes before `take`")
        return self._ahead.take()

    def read_held_out(self, count: int) -> Iterator[StoredBatch]:
        self._refuse_closed()
        decoder = ImageDecoder(self.source.config.side, self.place.micro_size)
        for numbers, valid_samples in self.place.iterate_held_out(count, self.source.count_samples()):
            batch = self._fill(decoder, numbers)
            batch.counted = valid_samples if valid_samples < len(numbers) else None
            yield batch

    def close(self) -> None:
        self._closed = True
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this reader is closed")

    def _fill(self, decoder: ImageDecoder, numbers: Sequence[int]) -> StoredBatch:
        images, tokens, masks = zip(*map(self.source.read_encoded, numbers), strict=True)
        pixels = self.source.decode_pixels(decoder, numbers, images)
        batch = StoredBatch(torch.from_numpy(np.stack(tokens)), torch.tensor(list(numbers)))
        batch.loss_mask, batch.extra = torch.from_numpy(np.stack(masks)), {"pixels": pixels}
        return batch


def _slice_batch(whole: StoredBatch, start: int, stop: int) -> StoredBatch:
    """Return rows [start, stop) of a batch."""
    batch = StoredBatch(whole.tokens[start:stop], whole.sample[start:stop])
    batch.loss_mask = None if whole.loss_mask is None else whole.loss_mask[start:stop]
    batch.extra = {name: each[start:stop] for name, each in whole.extra.items()}
    return batch
