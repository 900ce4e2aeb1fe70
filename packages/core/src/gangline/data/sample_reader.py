"""Core's batch reader, which prefetches `DataSource.sample` and stacks the samples into reused memory.

B sequences of a microbatch, T tokens
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from gangline.data.read_ahead import ReadAhead
from gangline.data.reader import BatchReader, ReadPlace, StoredBatch
from gangline.data.sample import GivesSamples, Sample

AHEAD = 2  # number of prefetched steps
_KNOWN = ("tokens", "loss_mask", "document", "position", "filled")
_STORED = (np.uint8, np.uint16, np.uint32, np.int8, np.int16, np.int32, np.int64)


class KeptMemory:
    """Host tensors by name, allocated on first use, and reallocated only if shape or dtype change.

    For a GPU the tensors are pinned, so that copies to the device do not block the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._kept: dict[Hashable, torch.Tensor] = {}

    def __call__(self, name: Hashable, shape: Sequence[int], dtype: np.dtype) -> tuple[torch.Tensor, np.ndarray]:
        """Return (tensor, numpy array of the same memory) of this name, shape and dtype, with the former content."""
        torch_dtype = _get_torch_dtype(dtype)
        tensor = self._kept.get(name)
        if tensor is None or tensor.shape != tuple(shape) or tensor.dtype != torch_dtype:
            tensor = self._kept[name] = torch.empty(tuple(shape), dtype=torch_dtype, pin_memory=self._pinned)
        return tensor, tensor.numpy()


class SampleReader(BatchReader):
    """Reader that calls a source's `sample` in `DataSource.threads` threads, `AHEAD` steps ahead of training."""

    def __init__(self, source: GivesSamples, place: ReadPlace) -> None:
        self.source, self.place = source, place
        self._memory = KeptMemory(place.device)  # for held-out batches
        self._ahead: ReadAhead[list[StoredBatch]] | None = None
        self._closed = False

    def begin(self, cursor: int, step: int) -> None:
        """Start to prefetch from this cursor, and stop an earlier prefetch. Raises RuntimeError if closed."""
        if self._closed:
            raise RuntimeError("this reader is closed")
        if self._ahead is not None:
            self._ahead.close()
        # New memory, because a thread that `close` could not end in time still writes into the former memory.
        make = partial(self._read, cursor, KeptMemory(self.place.device))
        self._ahead = ReadAhead(make, AHEAD + 1, self.source.threads, partial(use_device, self.place.device))

    def take(self) -> list[StoredBatch]:
        """Return the microbatches of the next step. Raises RuntimeError if closed, and before `begin`."""
        if self._ahead is None:
            raise RuntimeError("this reader is closed" if self._closed else "call `begin` before `take`")
        return self._ahead.take()

    def read_held_out(self, count: int) -> Iterator[StoredBatch]:
        """Yield this rank's share of the first `count` samples. Raises RuntimeError if closed."""
        if self._closed:
            raise RuntimeError("this reader is closed")
        for numbers, valid_samples in self.place.iterate_held_out(count, self.source.count_samples()):
            yield self._store(numbers, self._memory, "held out", valid_samples)

    def close(self) -> None:
        self._closed = True
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def _read(self, cursor: int, memory: KeptMemory, n: int, slot: int) -> list[StoredBatch]:
        first, size = self.place.find_first(cursor + n * self.place.global_size), self.place.micro_size
        starts = range(first, first + self.place.share, size)
        return [self._store(range(start, start + size), memory, (slot, start - first)) for start in starts]

    def _store(
        self, numbers: Sequence[int], memory: KeptMemory, slot: Hashable, counted: int | None = None
    ) -> StoredBatch:
        batch = stack_samples([self.source.sample(i) for i in numbers], numbers, memory, slot)
        batch.counted = None if counted is None or counted >= len(numbers) else counted
        return batch


def use_device(device: torch.device) -> None:
    """Set the CUDA device of a thread that pins memory; otherwise CUDA would also open a context on GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def stack_samples(
    samples: Sequence[Sample], numbers: Sequence[int], memory: KeptMemory, slot: Hashable = 0
) -> StoredBatch:
    """Stack samples into a microbatch, in the memory of `slot`. Raises ValueError if fields or shapes differ."""
    dtype = np.result_type(*{sample["tokens"].dtype for sample in samples})
    dtype = dtype if dtype in _STORED else np.dtype(np.int64)
    B, T = len(samples), len(samples[0]["tokens"]) - 1
    tokens, rows = memory(("tokens", slot), (B, T + 1), dtype)
    for row, sample in zip(rows, samples, strict=True):
        row[:] = sample["tokens"]
    batch = StoredBatch(tokens, torch.tensor(list(numbers), dtype=torch.int64))
    masked, apart = (any(name in sample for sample in samples) for name in ("loss_mask", "document"))
    if masked or apart:
        batch.loss_mask, rows = memory(("loss_mask", slot), (B, T), np.dtype(np.bool_))
        for row, sample in zip(rows, samples, strict=True):
            row[:] = sample.get("loss_mask", True)
    if apart or any("position" in sample for sample in samples):
        _set_documents(batch, samples, T, apart)
    if any("filled" in sample for sample in samples):
        batch.filled = torch.tensor([int(sample.get("filled", T)) for sample in samples])
    for name in dict.fromkeys(name for sample in samples for name in sample if name not in _KNOWN):
        batch.extra[name] = _read_further(name, samples, numbers, memory, slot)
    return batch


def _set_documents(stored: StoredBatch, samples: Sequence[Sample], T: int, apart: bool) -> None:
    """Set the ends of documents; set documents and positions only if they differ from what `expand` derives."""
    places, alone = np.arange(T), np.zeros(T, np.int64)
    document = np.stack([sample.get("document", alone) for sample in samples])
    # A source may set documents in some samples only; without `position` a sample has the positions of the sequence.
    position = np.stack([sample.get("position", places) for sample in samples])
    begins = np.zeros(document.shape, bool)
    np.not_equal(document[:, 1:], document[:, :-1], out=begins[:, 1:])
    if apart:
        stored.ends = torch.from_numpy(np.flatnonzero(begins).astype(np.int32))
    derived = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    if not (np.array_equal(derived, position) and np.array_equal(begins.cumsum(axis=1), document)):
        stored.position = torch.from_numpy(position.astype(np.int64))
        if apart:
            stored.document = torch.from_numpy(document.astype(np.int64))


def _read_further(
    name: str, samples: Sequence[Mapping[str, object]], numbers: Sequence[int], memory: KeptMemory, slot: Hashable
) -> torch.Tensor:
    arrays = []
    for i, sample in zip(numbers, samples, strict=True):
        if name not in sample:
            raise ValueError(f"sample {i} lacks the field {name!r}, which other samples of its batch have")
        arrays.append(np.asarray(sample[name]))
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"{name!r} must have one shape in a batch, got {' and '.join(map(str, sorted(shapes)))}")
    tensor, rows = memory((name, slot), (len(arrays), *arrays[0].shape), arrays[0].dtype)
    np.stack(arrays, out=rows)
    return tensor


def _get_torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
