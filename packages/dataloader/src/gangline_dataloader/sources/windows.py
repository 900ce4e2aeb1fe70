"""Sequences cut one after another out of long vectors of tokens (concatenate and cut).

Row r of a source reads its tokens r·T to (r+1)·T inclusive, so that in an epoch each token but the first is a target
once, and the last (N - 1) mod T never.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gangline.data import BatchReader, DataSource, ReadPlace, Sample
from gangline.errors import UserError
from gangline_dataloader.sources.places import Windows

if TYPE_CHECKING:
    from gangline.data.codec import TextCodec
    from gangline_dataloader.order.mixture import RowPlace
    from gangline_dataloader.sources.split import SplitRows

AHEAD = 1024  # samples whose places are computed at once: a call for one costs as much as a call for hundreds


class SampleOrder(Protocol):
    """Which row of which source a sample is."""

    @property
    def end(self) -> int | None:
        """The first sample that there is none for; None: there is always one."""

    @property
    def deciding(self) -> Any:
        """JSON: what the order is a function of, beside its key."""

    def __call__(self, numbers: np.ndarray) -> RowPlace: ...


class WindowSource(DataSource):
    """Windows of T tokens of several stores, in an order. Everything but the order is a property of the stores.

    parts      one for each source of the order: its store, and which of the store's rows are of this split
    documents  no attention across documents, positions start anew, no target in another document
    identity   what the order is a function of, beside the stores
    samples    in an epoch, or until all sources are used up; None: there is no end
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
    ) -> None:
        self.parts = tuple(parts)
        self.names, self.stores = [one.name for one in parts], [one.store for one in parts]
        self.order, self.codec, self.identity, self.samples = order, codec, identity, samples
        self.sequence_length, self.documents = sequence_length, documents
        self._first = np.array([one.first for one in parts], np.int64)
        self._ahead = lru_cache(maxsize=4)(self._rows)

    def rows(self, numbers: np.ndarray) -> RowPlace:
        """Which row of which store samples (N,) are."""
        place = self.order(numbers)
        return replace(place, row=self._first[place.source] + place.row)

    def places(self, numbers: np.ndarray) -> Windows:
        """Where samples (N,) begin."""
        place = self.rows(numbers)
        return Windows(place.source, place.row * self.sequence_length)

    def row_of(self, i: int) -> tuple[int, int]:
        """Number of the source and row of its store that sample `i` is."""
        block, offset = divmod(i, AHEAD)
        place = self._ahead(block)
        return int(place.source[offset]), int(place.row[offset])

    def pieces(self, source: int, row: int) -> list[tuple[int, int]]:
        """[start, stop) in the tokens of a source's store that row `row` of the store is made of, one after another."""
        start = row * self.sequence_length
        return [(start, start + self.sequence_length + 1)]

    def sample(self, i: int) -> Sample:
        if self.order.end is not None and i >= self.order.end:
            raise self.used_up(i)
        source, row = self.row_of(i)
        store, T = self.stores[source], self.sequence_length
        start = row * T
        tokens = np.empty((1, T + 1), store.dtype)
        store.windows(np.array([start]), T + 1, tokens)
        sample: Sample = {"tokens": tokens[0]}
        if self.documents:
            places = np.arange(T + 1)
            ends = store.ends(start, start + T) - start  # in (0, T]
            number = np.searchsorted(ends, places, side="right")
            begin = np.concatenate([[0], ends])[number]
            sample["document"] = number[:-1]
            sample["position"] = (places - begin)[:-1]
            sample["loss_mask"] = number[1:] == number[:-1]
        return sample

    def used_up(self, i: int) -> UserError:
        """What to raise where sample `i` is asked for and there is none."""
        return UserError(
            f"the data ends after {self.order.end} samples, and sample {i} was asked for.",
            "Every source that has a weight there is used up after its data.epochs.",
            "Fewer run.steps, or larger data.epochs.",
        )

    def reader(self, place: ReadPlace) -> BatchReader:
        from gangline_dataloader.sources.window_reader import WindowReader

        return WindowReader(self, place)

    def gather(self, windows: Windows, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fill out (N, T + 1) with windows (N,); gives (row, end), both (n,), of the documents that end in them.

        0 < end <= T; ascending by row, then end; none where documents are not kept apart.
        """
        T, found = self.sequence_length, []
        for source in np.unique(windows.source):
            rows = np.flatnonzero(windows.source == source)
            starts, store = windows.start[rows], self.stores[int(source)]
            store.windows(starts, T + 1, out, rows)
            if self.documents:
                row, end = store.ends_in(starts, T)
                found.append((rows[row], end))
        row, end = (np.concatenate(each) for each in zip((np.empty(0, np.int64),) * 2, *found, strict=True))
        order = np.argsort(row, kind="stable")
        return row[order], end[order]

    def _rows(self, block: int) -> RowPlace:
        stop, end = (block + 1) * AHEAD, self.order.end
        return self.rows(np.arange(block * AHEAD, stop if end is None else min(stop, end)))

    def length(self) -> int | None:
        return self.samples

    def state(self, i: int) -> dict[str, Any]:
        """Everything that may change while a run goes on."""
        parts = [[one.name, one.first, one.store.identity] for one in self.parts]
        return {"parts": parts, "order": self.order.deciding}

    def fingerprint(self) -> str:
        return self.fingerprint_of(self.state(0))

    def fingerprint_of(self, state: dict[str, Any]) -> str:
        """Of this source as it would be with that `state`."""
        deciding = (self.identity, self.sequence_length, self.documents, json.dumps(state, sort_keys=True))
        return blake2b(repr(deciding).encode(), digest_size=16).hexdigest()

    def change_order(self, order: SampleOrder) -> None:
        """Give the samples of another order from now on."""
        self.order = order
        self._ahead.cache_clear()

    def describe(self) -> str:
        tokens = sum(store.total for store in self.stores)
        known = [store.documents for store in self.stores if store.documents is not None]
        documents = f"{sum(known)} documents, " if len(known) == len(self.stores) else ""
        of = f" of {', '.join(self.names)}" if len(self.names) > 1 else ""
        return f"{documents}{tokens / 1e6:.4g} M tokens{of}, a vocabulary of {max(s.vocab_size for s in self.stores)}"

    def encode(self, text: str) -> list[int] | None:
        return None if self.codec is None else self.codec.encode(text)

    def decode(self, tokens: list[int]) -> str | None:
        return None if self.codec is None else self.codec.decode(tokens)
