"""Batches of a rank: from the data cursor to microbatches on the device, read by this rank or by a peer.

Under every layout a step reads samples [cursor, cursor + global batch size); the rank at `index` of `width` reads a
contiguous share of these samples, in microbatches of `micro_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from gangline.batch import Batch
from gangline.comm.base import Comm
from gangline.data.base import DataSource
from gangline.data.expand import expand
from gangline.data.reader import BatchReader, ReadPlace, StoredBatch
from gangline.train.peers import hand_over


class Batches:
    """This rank's share of every global batch, from the source's reader to the device.

    peers: all ranks with an equal share, if the first one reads for all (`DataSource.shared`); None: each rank reads
    """

    def __init__(self, source: DataSource, place: ReadPlace, peers: Comm | None = None) -> None:
        self.source, self.place = source, place
        self._peers = None if peers is None or peers.size == 1 else peers
        self._reader = source.open_reader(place) if self._peers is None or self._peers.index == 0 else None
        # (cursor, step) of the batch that the reader returns next; any other step needs `begin`
        self._next: tuple[int, int] | None = None
        self._copied: torch.cuda.Event | None = None

    def take(self, cursor: int, step: int, size: int | None = None) -> list[Batch]:
        """Return the microbatches of step `step` (from 0), whose global batch begins at sample `cursor`.

        size: global batch size of this and later steps; None: unchanged.
        """
        self._wait_for_copies()
        if size is not None and size != self.place.global_size:
            self._resize(size)
        stored_batches = self._hand_over(lambda reader: self._read(reader, cursor, step))
        batches = [expand(batch, step, self.place.device) for batch in stored_batches]
        if self.place.device.type == "cuda":
            self._copied = torch.cuda.current_stream(self.place.device).record_event()
        return batches

    def read_held_out(self, count: int) -> list[Batch]:
        """Return this rank's microbatches of the first `count` samples (or all samples), padded with rows without loss.

        Samples are equal under every layout, and the number of microbatches is equal on every rank.
        """
        batches: list[Batch] = []
        iterators: list[Iterator[StoredBatch]] = []

        def read(reader: BatchReader) -> list[StoredBatch]:
            if not iterators:
                iterators.append(reader.read_held_out(count))
            return [next(iterators[0])]

        for _ in self.place.iterate_held_out(count, self.source.count_samples()):
            stored_batches = self._hand_over(read)
            batches += [expand(batch, 0, self.place.device) for batch in stored_batches]
            if self.place.device.type == "cuda":
                torch.cuda.current_stream(self.place.device).synchronize()
        return batches

    def close(self) -> None:
        """End the reader's threads."""
        self._wait_for_copies()
        if self._reader is not None:
            self._reader.close()

    def _hand_over(self, read: Callable[[BatchReader], Sequence[StoredBatch]]) -> Sequence[StoredBatch]:
        """Return the batches of this rank's reader, or of the peer that reads for it."""
        if self._peers is None:
            assert self._reader is not None
            return read(self._reader)
        try:
            own_batches: Sequence[StoredBatch] | Exception | None = None if self._reader is None else read(self._reader)
        except Exception as error:
            own_batches = error
        return hand_over(own_batches, self._peers)

    def _read(self, reader: BatchReader, cursor: int, step: int) -> Sequence[StoredBatch]:
        if self._next != (cursor, step):
            reader.begin(cursor, step)
        self._next = None  # after an error the reader's position is unknown
        stored_batches = reader.take()
        self._next = cursor + self.place.global_size, step + 1
        return stored_batches

    def _resize(self, size: int) -> None:
        """Change the global batch size of the next steps, with a new reader: readers prefetch batches of one size."""
        self.place = replace(self.place, global_size=size)
        self._next = None
        if self._reader is not None:
            self._reader.close()
            self._reader = self.source.open_reader(self.place)

    def _wait_for_copies(self) -> None:
        """Wait until the GPU has copied the last batches, because the reader reuses their memory."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
