"""Batch readers: the contract to prefetch the batches of one rank. Torch is imported for types only."""

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
    """Work of a reader: its rank's share of every global batch, the microbatch size, and the rank's device.

    The step at data cursor c reads samples [c, c + global_size), split into `width` equal contiguous shares; the rank
    reads share number `index`, in microbatches of `micro_size` samples. So global batches are equal under every layout.
    Raises ValueError if `global_size` does not divide by `width`, or the share by `micro_size`.
    """

    index: int  # number of this rank's share, from 0
    width: int  # number of shares of a global batch
    global_size: int  # number of samples of a global batch
    micro_size: int  # number of samples of a microbatch
    device: torch.device  # device of this rank
    comms: Comms | None = None  # process groups, for a reader whose ranks communicate; None: a single rank

    def __post_init__(self) -> None:
        if self.share * self.width != self.global_size or self.share % self.micro_size:
            raise ValueError(
                f"a global batch of {self.global_size} samples is not divisible into {self.width} shares of "
                f"microbatches of {self.micro_size}"
            )

    @property
    def share(self) -> int:
        """Number of samples per step that this rank reads."""
        return self.global_size // self.width

    @property
    def microbatches(self) -> int:
        """Number of microbatches per step of this rank."""
        return self.share // self.micro_size

    def find_first(self, cursor: int) -> int:
        """Return the number of this rank's first sample in the global batch that begins at `cursor`."""
        return cursor + self.index * self.share

    def iterate_held_out(self, count: int, length: int | None) -> Iterator[tuple[list[int], int]]:
        """Yield (sample numbers, n) for each of this rank's microbatches over the first `count` samples.

        Only the first n samples of a microbatch count; the rest is padding, so that all ranks have equally many
        microbatches. Samples are equal under every layout. length: number of samples of the source; None: endless.
        """
        count = count if length is None else min(count, length)
        rows = -(-count // (self.width * self.micro_size)) * self.micro_size
        for start in range(self.index * rows, (self.index + 1) * rows, self.micro_size):
            yield [min(i, count - 1) for i in range(start, start + self.micro_size)], max(0, count - start)


@dataclass
class StoredBatch:
    """One microbatch of B sequences of T tokens, as a reader returns it; core expands it to a `Batch` on the device."""

    tokens: torch.Tensor  # (B, T+1) any integer dtype, as stored: inputs [:, :-1] and targets [:, 1:]
    sample: torch.Tensor  # (B,) int64, in host memory: global sample numbers
    # (n,) int32, in host memory, ascending: ends of documents, b·T + e for a document that ends before token e of row
    # b, 0 < e <= T; None: the data does not separate documents
    ends: torch.Tensor | None = None
    # (B, T) bool: targets that count in the loss; None: all but the target past each end in `ends`
    loss_mask: torch.Tensor | None = None
    document: torch.Tensor | None = None  # (B, T) document numbers; None: counted from 0 in each sequence
    position: torch.Tensor | None = None  # (B, T) token positions; None: counted from 0 in each document
    # (B,) integer, in host memory: number of inputs in each row before its padding; None: no padding
    filled: torch.Tensor | None = None
    counted: int | None = None  # number of first rows that count in the loss; None: all rows
    extra: dict[str, torch.Tensor] = field(default_factory=dict)  # further tensors (B, ...) by name


class BatchReader(ABC):
    """Contract of a reader of this rank's microbatches. Bytes and order must equal those of `DataSource.sample`.

    A reader prefetches, so that a step does not wait. A `take` raises the error of the prefetch of its own step.
    """

    @abstractmethod
    def begin(self, cursor: int, step: int) -> None:
        """Make the next `take` return step `step` (from 0), whose global batch begins at sample `cursor`.

        Called before the first `take`, and again when the cursor jumps: a resume, a rollback, skipped samples.
        """

    @abstractmethod
    def take(self) -> Sequence[StoredBatch]:
        """Return this rank's microbatches of the next step. Consecutive calls return consecutive steps.

        The next call of any method may overwrite the memory of the microbatches.
        """

    @abstractmethod
    def read_held_out(self, count: int) -> Iterator[StoredBatch]:
        """Yield this rank's microbatches of the first `count` samples, as `ReadPlace.iterate_held_out` divides them.

        The request for the next microbatch may overwrite the memory of the previous one.
        """

    @abstractmethod
    def close(self) -> None:
        """End the reader's threads and free its memory; a later `take` raises RuntimeError. May be called twice."""
