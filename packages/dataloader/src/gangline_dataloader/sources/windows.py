"""Data source of fixed-length sequences, split one after another from concatenated documents (concatenate and chunk).

Row r of a source has the source's tokens r·T to (r+1)·T inclusive. So in an epoch each of N tokens is a target once,
except the first token and the last (N - 1) mod T tokens, which are never targets.
"""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gangline import UserError
from gangline.data.base import DataSource
from gangline.data.reader import BatchReader, ReadPlace
from gangline.data.sample import Sample
from gangline_dataloader.order.mixture import RowPlace

if TYPE_CHECKING:
    from gangline_basics.data.codec import TextCodec
    from gangline_dataloader.sources.infill import Infill
    from gangline_dataloader.sources.split import SplitRows
    from gangline_dataloader.store.tokens import Tokens

AHEAD = 1024  # samples that are located in one call: a call for one sample costs as much as a call for hundreds
MANY = 256  # minimum number of samples for which locating them directly is faster than by cached blocks


MakeReader = Callable[["WindowSource", ReadPlace], BatchReader]


class SampleOrder(Protocol):
    """The order of a data source: maps sample numbers to source, epoch and row."""

    @property
    def end(self) -> int | None:
        """Number of samples until the data ends; None: it never ends."""

    @property
    def deciding(self) -> Any:
        """JSON value that determines the order, together with the key."""

    def __call__(self, numbers: np.ndarray) -> RowPlace: ...


@dataclass
class StoredRows:
    """The data of samples (N,), with tokens in their stored width.

    tokens     (N, T+1)
    ends       (n,) int32, ascending: r·T + e for a document that ends before token e of row r, 0 < e <= T; empty if
               documents are not separated
    loss_mask  (N, T) bool over the targets; None: all targets except the first target after each document end
    filled     (N,) number of the T inputs that belong to documents, the rest is padding; None: no padding
    """

    tokens: np.ndarray
    ends: np.ndarray
    loss_mask: np.ndarray | None = None
    filled: np.ndarray | None = None


class WindowSource(DataSource, ABC):
    """Data source of windows of T tokens from one or more stores, in an order.

    Subclasses define the changes with which a run may continue (a store that grew, a mixture that changes), or other
    contents of rows.

    parts      one for each source of the order: its store, and the store's rows in this split
    documents  whether documents are separated: no attention and no targets across documents, positions restart
    identity   values that determine the samples, next to the stores
    samples    number of samples of an epoch, or until all sources are used up; None: no end
    infill     fill-in-the-middle of documents; None: off
    reach      number of samples that a shuffle spans: shards of remote stores are prefetched that far ahead
    make_reader  function that makes the batch reader; None: WindowReader
    """

    def __init__(
        self,
        parts: Sequence[SplitRows],
        order: SampleOrder,
        codec: TextCodec | None,
        *,
        sequence_length: int,
        documents: bool,
        identity: tuple[object, ...],
        samples: int | None,
        infill: Infill | None = None,
        reach: int = 0,
        make_reader: MakeReader | None = None,
    ) -> None:
        self._make_reader = make_reader
        self.parts = tuple(parts)
        self.names, self.stores = [one.name for one in parts], [one.store for one in parts]
        self.order, self.codec, self.identity, self.samples = order, codec, identity, samples
        self.sequence_length, self.documents, self.infill, self.reach = sequence_length, documents, infill, reach
        self.dtype = np.result_type(*{store.dtype for store in self.stores})
        self.masked = any(store.masked for store in self.stores)
        self.distant = any(store.distant for store in self.stores)
        self._ahead = lru_cache(maxsize=4)(self._locate_block)

    def locate_samples(self, numbers: np.ndarray) -> RowPlace:
        """Locate samples (N,): source, epoch, row of the store. Announce these and later samples to remote stores."""
        place = self._locate_samples(numbers)
        if self.distant and numbers.size:
            later = np.asarray(numbers) + max(AHEAD, self.reach)
            end = self.order.end
            for one in (place, self._locate_samples(later if end is None else later[later < end])):
                starts = self.find_row_starts(one)
                for k in np.unique(one.source).tolist():
                    self.stores[k].announce(starts[one.source == k])
        return place

    def _locate_samples(self, numbers: np.ndarray) -> RowPlace:
        place = self.order(numbers)
        if len(self.parts) == 1:
            return replace(place, row=self.parts[0].find_rows(place.row))
        row = np.empty_like(place.row)
        for k in np.unique(place.source).tolist():
            here = place.source == k
            row[here] = self.parts[k].find_rows(place.row[here])
        return replace(place, row=row)

    def find_row_starts(self, place: RowPlace) -> np.ndarray:
        """Return the index of the first token of each row (N,) in its store, (N,)."""
        return place.row * self.sequence_length

    def locate_sample(self, i: int) -> tuple[int, int]:
        """Locate sample `i`: (index of the source, row of its store)."""
        block, offset = divmod(i, AHEAD)
        place = self._ahead(block)
        return int(place.source[offset]), int(place.row[offset])

    def list_token_ranges(self, source: int, row: int) -> list[tuple[int, int]]:
        """List the token ranges [start, stop) of a source's store that make row `row` of the store, in order."""
        start = row * self.sequence_length
        return [(start, start + self.sequence_length + 1)]

    def fill(self, numbers: np.ndarray, out: np.ndarray | None = None, place: RowPlace | None = None) -> StoredRows:
        """Read samples `numbers` (N,), which should be close to each other.

        out    (N, T+1) contiguous memory for the tokens; None: it is allocated
        place  result of `locate_samples` for the samples; None: `fill` locates the samples
        Raises UserError past the end of the data, for a token outside the vocabulary, and for a file that has changed.
        """
        self.look_again()
        numbers, T = np.asarray(numbers, np.int64), self.sequence_length
        place = self.look_up_samples(numbers) if place is None else place
        starts, at = place.row * T, np.arange(len(numbers)) * (T + 1)
        tokens = np.empty((len(numbers), T + 1), self.dtype) if out is None else out
        self.copy(place.source, starts, starts + T + 1, tokens.reshape(-1), at)
        self.check(tokens, place)
        if self.infill is not None:
            self.infill.apply(tokens, numbers, self.find_window_ends(place.source, starts, T + 1))
        ends = self.find_window_ends(place.source, starts, T) if self.documents else np.empty(0, np.int32)
        if not self.masked:
            return StoredRows(tokens, ends)
        token_mask = np.empty((len(numbers), T + 1), np.uint8)
        self.copy(place.source, starts, starts + T + 1, token_mask.reshape(-1), at, mask=True)
        return StoredRows(tokens, ends, make_loss_mask(token_mask, ends))

    def check(self, tokens: np.ndarray, place: RowPlace) -> None:
        """Raise UserError if a file has changed, or one of `tokens` (N, T+1) from `place` is not in the vocabulary."""
        self.look_again()
        store = self.stores[0]  # a mixture has one vocabulary
        if store.ranged or np.iinfo(self.dtype).max < store.vocab_size or int(tokens.max()) < store.vocab_size:
            return
        row = int(np.argmax((tokens >= store.vocab_size).any(1)))
        name = self.stores[int(place.source[row])].name
        raise UserError(
            f"{name} contains token {tokens[row].max()}, outside its vocabulary of {store.vocab_size} tokens.",
            f"The token is in row {place.row[row]} of {self.sequence_length}-token rows. A file is damaged.",
            f"gangline data verify {name}",
        )

    def look_again(self) -> None:
        """Look again whether files have changed. Raises UserError if so.

        Called before mapped files are read, because a truncated file would end the process, and before data is used.
        """
        for store in self.stores:
            store.look_again()

    def look_up_samples(self, numbers: np.ndarray) -> RowPlace:
        """Locate samples close to each other, by cached blocks of samples. Raises UserError past the data's end."""
        if self.order.end is not None and int(numbers.max()) >= self.order.end:
            raise self.explain_end(int(numbers.max()))
        if len(numbers) >= MANY:
            return self.locate_samples(numbers)
        place = RowPlace(*(np.empty_like(numbers) for _ in range(3)))
        blocks, offsets = np.divmod(numbers, AHEAD)
        for block in np.unique(blocks).tolist():
            here, ahead = blocks == block, self._ahead(block)
            for column in ("source", "epoch", "row"):
                getattr(place, column)[here] = getattr(ahead, column)[offsets[here]]
        return place

    def sample(self, i: int) -> Sample:
        rows, T = self.fill(np.array([i])), self.sequence_length
        sample: Sample = {"tokens": rows.tokens[0]}
        if rows.loss_mask is not None:
            sample["loss_mask"] = rows.loss_mask[0]
        if rows.filled is not None:
            sample["filled"] = np.asarray(rows.filled[0])
        if self.documents:
            places = np.arange(T)
            number = np.searchsorted(rows.ends, places, side="right")
            sample["document"] = number
            sample["position"] = places - np.concatenate([[0], rows.ends])[number]
            if rows.loss_mask is None:
                sample["loss_mask"] = np.ones(T, bool)
                sample["loss_mask"][rows.ends - 1] = False
        return sample

    def explain_end(self, i: int) -> UserError:
        """Return the error for a request of sample `i` past the end of the data."""
        return UserError(
            f"sample {i} does not exist: the data ends after {self.order.end} samples.",
            "Every source with a weight has reached its data.epochs.",
            "Reduce run.steps or increase data.epochs.",
        )

    def open_reader(self, place: ReadPlace) -> BatchReader:
        from gangline_dataloader.sources.window_reader import WindowReader

        if self._make_reader is not None:
            return self._make_reader(self, place)
        return WindowReader(self, place)

    def copy(
        self,
        source: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
        out: np.ndarray,
        at: np.ndarray,
        mask: bool = False,
    ) -> None:
        """Copy tokens [start, stop) of stores `source` (n,), if `mask` the loss mask, to `out` (M,) at `at` (n,)."""
        for store, here in self._group_by_store(source):
            copy = store.copy_loss_mask if mask else store.copy
            copy(starts[here], stops[here], out, at[here])

    def find_window_ends(self, source: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
        """Find the document ends in windows (N,) of `length` tokens, as in `StoredRows.ends`."""
        at = np.arange(len(source)) * length
        ends = [store.find_borders(starts[here], length, at[here]) for store, here in self._group_by_store(source)]
        return (ends[0] if len(ends) == 1 else np.sort(np.concatenate(ends))).astype(np.int32)

    def _group_by_store(self, source: np.ndarray) -> list[tuple[Tokens, np.ndarray | slice]]:
        if len(self.stores) == 1:
            return [(self.stores[0], slice(None))]
        return [(self.stores[k], np.flatnonzero(source == k)) for k in np.unique(source).tolist()]

    def _locate_block(self, block: int) -> RowPlace:
        stop, end = (block + 1) * AHEAD, self.order.end
        return self.locate_samples(np.arange(block * AHEAD, stop if end is None else min(stop, end)))

    def count_samples(self) -> int | None:
        return self.samples

    def state(self, i: int) -> dict[str, Any]:
        """Return everything that may change when a run resumes: the identities of the parts, and the order."""
        return {"parts": [one.get_identity() for one in self.parts], "order": self.order.deciding}

    def compute_fingerprint(self) -> str:
        return self.compute_state_fingerprint(self.state(0))

    def compute_state_fingerprint(self, state: dict[str, Any]) -> str:
        """Compute the fingerprint that this source would have with `state`."""
        deciding = (self.identity, self.sequence_length, self.documents, json.dumps(state, sort_keys=True))
        return blake2b(repr(deciding).encode(), digest_size=16).hexdigest()

    def change_order(self, order: SampleOrder) -> None:
        """Change the order of the samples from now on."""
        self.order = order
        # A new cache, set after the new order: a reader's thread may still finish a block of the old order.
        self._ahead = lru_cache(maxsize=4)(self._locate_block)

    def describe(self) -> str:
        tokens = sum(store.total for store in self.stores)
        counts = [store.documents for store in self.stores if store.documents is not None]
        documents = f"{sum(counts)} documents, " if len(counts) == len(self.stores) else ""
        of = f" of {', '.join(self.names)}" if len(self.names) > 1 else ""
        return f"{documents}{tokens / 1e6:.4g} M tokens{of}, vocabulary size {max(s.vocab_size for s in self.stores)}"

    def identify_tokenizer(self) -> str | None:
        return None if self.codec is None else f"{self.codec.identity}, end of text {self.codec.separator}"

    def encode(self, text: str) -> list[int] | None:
        return None if self.codec is None else self.codec.encode(text)

    def decode(self, tokens: list[int]) -> str | None:
        return None if self.codec is None else self.codec.decode(tokens)


def make_loss_mask(token_mask: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Make the loss mask of targets (N, T) bool from `token_mask` (N, T+1) uint8; false after each end."""
    mask = token_mask[:, 1:].astype(bool, order="C")
    mask.reshape(-1)[ends - 1] = False
    return mask
