"""Sequences cut one after another out of long vectors of tokens (concatenate and cut).

Row r of a source reads its tokens r·T to (r+1)·T inclusive, so that in an epoch each token but the first is a target
once, and the last (N - 1) mod T never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gangline.data import DataSource, Sample

if TYPE_CHECKING:
    from gangline.data.codec import Codec
    from gangline_dataloader.order.mixture import Place
    from gangline_dataloader.store.tokens import Tokens

AHEAD = 1024  # samples whose places are computed at once: a call for one costs as much as a call for hundreds


class Order(Protocol):
    """Which row of which source a sample is."""

    end: int | None

    def __call__(self, numbers: np.ndarray) -> Place: ...


@dataclass(frozen=True)
class Windows:
    """Where the windows (N,) of some samples begin: number of the source, number of the first token in it."""

    source: np.ndarray
    start: np.ndarray


class WindowSource(DataSource):
    """Windows of T tokens of several stores, in an order. Everything but the order is a property of the stores.

    stores     one for each source of the order
    documents  no attention across documents, positions start anew, no target in another document
    identity   what the order is a function of, beside the stores
    samples    in an epoch; None: there is no end
    first      rows of the store before those of this split
    """

    def __init__(
        self,
        stores: Sequence[Tokens],
        order: Order,
        codec: Codec | None,
        *,
        sequence_length: int,
        documents: bool,
        identity: tuple[object, ...],
        samples: int | None,
        first: int = 0,
    ) -> None:
        self.stores, self.order, self.codec = list(stores), order, codec
        self.sequence_length, self.documents, self.identity, self.samples = (
            sequence_length,
            documents,
            identity,
            samples,
        )
        self.first = first
        self._ahead = lru_cache(maxsize=4)(self._places)

    def places(self, numbers: np.ndarray) -> Windows:
        """Where samples (N,) begin."""
        place = self.order(numbers)
        return Windows(place.source, (self.first + place.row) * self.sequence_length)

    def sample(self, i: int) -> Sample:
        block, offset = divmod(i, AHEAD)
        windows = self._ahead(block)
        store, start = self.stores[int(windows.source[offset])], int(windows.start[offset])
        T = self.sequence_length
        tokens = np.empty((1, T + 1), store.dtype)
        store.windows(windows.start[offset : offset + 1], T + 1, tokens)
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

    def _places(self, block: int) -> Windows:
        return self.places(np.arange(block * AHEAD, (block + 1) * AHEAD))

    def length(self) -> int | None:
        return self.samples  # None: a mixture has no end

    def fingerprint(self) -> str:
        deciding = (self.identity, self.sequence_length, self.documents, [store.identity for store in self.stores])
        return blake2b(repr(deciding).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        tokens = sum(store.total for store in self.stores)
        known = [store.documents for store in self.stores if store.documents is not None]
        documents = f"{sum(known)} documents, " if len(known) == len(self.stores) else ""
        return f"{documents}{tokens / 1e6:.4g} M tokens, a vocabulary of {max(s.vocab_size for s in self.stores)}"

    def encode(self, text: str) -> list[int] | None:
        return None if self.codec is None else self.codec.encode(text)

    def decode(self, tokens: list[int]) -> str | None:
        return None if self.codec is None else self.codec.decode(tokens)
