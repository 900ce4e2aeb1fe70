"""Batch readers: the contract, complete batches of one rank, prefetched. Torch is imported for types only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comms


@dataclass(frozen=True)
class ReadPlace:
    """The rank that a reader reads for: its share of every global batch, its microbatches, and its device.

    The step that begins at sample c reads samples [c, c + global_size); the rank at `index` of `width` reads the
    `index`-th of `width` equal runs of these, in microbatches of `micro_size`, so that a run has the same batches on
    every layout. Raises ValueError if that does not divide.
    """

    index: int
    width: int
    global_size: int
    micro_size: int
    device: torch.device
    comms: Comms | None = None  # for a reader whose ranks communicate; None: a single rank

    def __post_init__(self) -> None:
        if self.share * self.width != self.global_size or self.share % self.micro_size:
            raise ValueError(
                f"{self.global_size} samples do not divide into {self.width} shares of microbatches of "
                f"{self.micro_size}"
            )

    @property
    def share(self) -> int:
        """Number of samples of a step that this rank reads."""
        return self.global_size // self.width

    @property
    def microbatches(self) -> int:
        """Number of microbatches in a step of this rank."""
        return self.share // self.micro_size

    def find_first(self, cursor: int) -> int:
        """Return the first sample that this rank reads of the batch that begins at `cursor`."""
        return cursor + self.index * self.share

    def iterate_held_out(self, count: int, length: int | None) -> Iterator[tuple[list[int], int]]:
        """Yield (samples, n) of this rank's microbatches over the first `count` samples: only the first n count.

        Every layout has the same samples, and every rank the same number of microbatches, padded with samples that do
        not count. length: number of samples of the source; None: unlimited.
        """
        count = count if length is None else min(count, length)
        rows = -(-count // (self.width * self.micro_size)) * self.micro_size
        for start in range(self.index * rows, (self.index + 1) * rows, self.micro_size):
            yield [min(i, count - 1) for i in range(start, start + self.micro_size)], max(0, count - start)


@dataclass
class StoredBatch:
    """One microbatch of B sequences of T tokens as a reader returns it; core makes a Batch of it on the device.

    tokens     (B, T+1)  any integer dtype, as stored: inputs [:, :-1] and targets [:, 1:]
    sample     (B,)      int64, in the host's memory: global sample numbers
    ends       (n,)      int32, in the host's memory, ascending: where documents end, b·T + e of one that ends before
                         token e of row b, 0 < e <= T; None: the data does not separate documents
    loss_mask  (B, T)    bool, which targets count; None: all but those past the end of a document
    document   (B, T)    numbers of documents if they are not counted from 0 in each sequence; else None
    position   (B, T)    positions if they are not counted from 0 in each document; else None
    filled     (B,)      integer, in the host's memory: inputs of each row before its padding; None: no padding
    counted    number of rows, from the first, that count in the loss; None: all
    extra      further tensors (B, ...) by name
    """

    tokens: torch.Tensor
    sample: torch.Tensor
    ends: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    document: torch.Tensor | None = None
    position: torch.Tensor | None = None
    filled: torch.Tensor | None = None
    counted: int | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


class BatchReader(ABC):
    """Contract of a reader of this rank's microbatches. Bytes and order must be those of `DataSource.sample`.

    A reader prefetches, so that a step does not wait. An error of the prefetch is raised by the `take` that would have
    returned the data.
    """

    @abstractmethod
    def begin(self, cursor: int, step: int) -> None:
        """Set the next `take` to step `step` (counted from 0), whose global batch begins at sample `cursor`.

        Called before the first `take`, and again after every jump: a resume, a rollback, skipped samples.
        """

    @abstractmethod
    def take(self) -> Sequence[StoredBatch]:
        """Return the microbatches of the next step. Steps follow each other without a gap.

        The next call of any method may overwrite their memory.
        """

    @abstractmethod
    def read_held_out(self, count: int) -> Iterator[StoredBatch]:
        """Yield this rank's share of the first `count` samples, by `ReadPlace.iterate_held_out`.

        The memory of a batch may be overwritten when the next is requested.
        """

    @abstractmethod
    def close(self) -> None:
        """End the threads and free the memory; a later `take` raises RuntimeError. May be called twice."""
