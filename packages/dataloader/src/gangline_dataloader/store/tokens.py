"""A corpus as one long vector of tokens, wherever its shards lie: what a window of it holds, and where documents end.

N rows (windows), T tokens of a sequence. Nothing here knows of seeds, epochs or ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

AT_ONCE = 1 << 18  # bytes of windows that are copied at once
FEW = 8  # windows of a shard that are worth a call


class Tokens(ABC):
    """All tokens of a corpus, numbered from 0, in stored width."""

    dtype: np.dtype
    total: int  # tokens
    vocab_size: int
    end_of_text: int | None  # the token behind each document
    identity: str  # the version of the data
    documents: int | None  # how many; None: nobody counted
    distant: bool = False  # whether `announce` is worth a call
    masked: bool = False  # whether only some tokens are to be learnt
    ranged: bool = False  # whether `copy` itself holds tokens against the vocabulary
    name: str  # for messages

    @abstractmethod
    def copy(self, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
        """Tokens [start, stop) of each of (n,) to out[at:at + stop - start], `out` (M,) in one piece and of our dtype.

        All lie inside the corpus.
        """

    def copy_learnt(self, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
        """As `copy`, uint8: 1 for a token that is to be learnt."""
        for first, length in zip(at.tolist(), (stops - starts).tolist(), strict=True):
            out[first : first + length] = 1

    def copy_windows(self, starts: np.ndarray, length: int, out: np.ndarray) -> None:
        """Fill out (N, length) with the tokens from each of `starts` (N,) on."""
        self.copy(starts, starts + length, out.reshape(-1), np.arange(len(starts)) * length)

    @abstractmethod
    def find_document_ends(self, start: int, stop: int) -> np.ndarray:
        """Exclusive ends of documents in (start, stop], ascending int64; empty where nobody knows them."""

    @abstractmethod
    def find_borders(self, starts: np.ndarray, length: int, at: np.ndarray) -> np.ndarray:
        """(n,) int64, ascending: at + (end - start) of the `ends` in (start, start + length], for each of (N,)."""

    def announce(self, starts: np.ndarray) -> None:
        """Tokens from which windows will be read soon. Nothing to do where they are mapped."""

    def look_again(self) -> None:
        """Whether files are still what they were when they were opened, now and then. Raises UserError."""

    def find_document(self, token: int) -> int | None:
        """The number of the document that a token is in, counted from 0; None where nobody knows."""
        return None

    def list_documents(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the documents with tokens in [start, stop), ascending; none if they are unknown."""
        first, last = self.find_document(start), self.find_document(stop - 1)
        return [] if first is None or last is None else list(range(first, last + 1))

    def compute_ends(self) -> np.ndarray:
        """(S,) int64: tokens up to the end of each shard that more may be put behind; others are one shard."""
        return np.array([self.total], np.int64)

    def count_rows(self, length: int) -> int:
        """How many sequences of `length` tokens there are, each with one more to look ahead at."""
        return max(0, (self.total - 1) // length)


class Sharded(Tokens):
    """Vectors end to end, each opened when it is first read; who derives from it says how.

    lengths  tokens of each shard
    keep     at most so many shards are open at a time; None: all, for what is only mapped
    """

    def __init__(
        self,
        lengths: Sequence[int],
        dtype: np.dtype,
        *,
        vocab_size: int,
        end_of_text: int | None,
        identity: str,
        documents: int | None,
        keep: int | None = None,
    ) -> None:
        self.keep = keep
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.dtype, self.total = dtype, int(self._starts[-1])
        self.vocab_size, self.end_of_text, self.identity = vocab_size, end_of_text, identity
        self.documents = documents
        self.shard = lru_cache(keep)(self.open)
        self.shard_ends = lru_cache(keep)(self.open_ends)
        self.shard_loss = lru_cache(keep)(self.open_loss)

    @abstractmethod
    def open(self, shard: int) -> np.ndarray:
        """The tokens of one shard."""

    @abstractmethod
    def open_ends(self, shard: int) -> np.ndarray | None:
        """The exclusive ends of its documents, ascending; None where nobody knows them."""

    def open_loss(self, shard: int) -> np.ndarray:
        """Which of its tokens are to be learnt, uint8; asked where `masked`."""
        raise NotImplementedError

    def copy(self, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
        self._copy(self.shard, starts, stops, out, at)

    def copy_learnt(self, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
        if self.masked:
            self._copy(self.shard_loss, starts, stops, out, at)
        else:
            super().copy_learnt(starts, stops, out, at)

    def _copy(
        self,
        opened: Callable[[int], np.ndarray],
        starts: np.ndarray,
        stops: np.ndarray,
        out: np.ndarray,
        at: np.ndarray,
    ) -> None:
        shards, across = self._group_by_shard(starts, stops)
        lengths = stops - starts
        length = int(lengths[0])
        # Rows of a few shards are gathered; where there are many, or pieces of any length, one is copied after another.
        if out.size % length == 0 and len(starts) >= FEW * len(shards) and (lengths == length).all():
            rows, beyond = np.divmod(at, length)
            if not beyond.any():
                for shard, here in shards:
                    copy_rows(opened(shard), starts[here] - self._starts[shard], length, out, rows[here])
                shards = []
        for shard, here in shards:
            copy_pieces(opened(shard), starts[here] - self._starts[shard], lengths[here], out, at[here])
        for piece in across:
            first, stop, shift = int(starts[piece]), int(stops[piece]), int(at[piece] - starts[piece])
            while first < stop:
                shard = int(np.searchsorted(self._starts, first, side="right")) - 1
                base, end = int(self._starts[shard]), min(stop, int(self._starts[shard + 1]))
                out[first + shift : end + shift] = opened(shard)[first - base : end - base]
                first = end

    def find_document_ends(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        parts = []
        for shard in range(int(first), int(last) + 1):
            ends, base = self.shard_ends(shard), int(self._starts[shard])
            if ends is None:
                continue
            low, high = _count_before(
                ends, np.array([max(0, start - base), min(stop - base, self._get_shard_length(shard))])
            )
            parts.append(ends[low:high].astype(np.int64) + base)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def find_borders(self, starts: np.ndarray, length: int, at: np.ndarray) -> np.ndarray:
        shards, rest = self._group_by_shard(starts, starts + length)
        borders = [np.empty(0, np.int64)]
        for shard, here in shards:
            ends = self.shard_ends(shard)
            if ends is None:
                continue
            first = starts[here] - self._starts[shard]
            order = np.argsort(first)  # one search goes on where the one before it ended, in memory that is near
            first, here = first[order], here[order]
            low, high = _count_before(ends, first), _count_before(ends, first + length)
            counts = high - low
            inside = ends[np.arange(int(counts.sum())) + np.repeat(low - np.cumsum(counts) + counts, counts)]
            borders.append(inside.astype(np.int64) + np.repeat(at[here] - first, counts))
        for row in rest:
            start = int(starts[row])
            borders.append(self.find_document_ends(start, start + length) - start + at[row])
        return np.sort(np.concatenate(borders))

    def _group_by_shard(self, starts: np.ndarray, stops: np.ndarray) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
        """([(shard, which of the pieces lie in it)], which lie in several)."""
        if len(self._starts) == 2:
            return [(0, np.arange(len(starts)))], np.empty(0, np.int64)
        shard_of = np.searchsorted(self._starts, starts, side="right") - 1
        inside = stops <= self._starts[shard_of + 1]
        order = np.argsort(shard_of, kind="stable")
        order = order[inside[order]]
        shards, first = np.unique(shard_of[order], return_index=True)
        groups = zip(shards.tolist(), np.split(order, first)[1:], strict=True)
        return list(groups), np.flatnonzero(~inside)

    def _get_shard_length(self, shard: int) -> int:
        return int(self._starts[shard + 1] - self._starts[shard])


def _count_before(ends: np.ndarray, places: np.ndarray) -> np.ndarray:
    """How many of the ascending `ends` are at most each place; in their dtype, or numpy would copy all of them."""
    return np.searchsorted(ends, places.astype(ends.dtype), side="right")


def copy_pieces(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
    """data[start:start + length] to out[at:at + length], for each of (n,)."""
    size = _get_token_size(data, out)
    # Slices of numpy would give the interpreter to other threads, and wait for it, at each of them.
    source, target = data.data.cast("B"), out.data.cast("B")
    places = zip((starts * size).tolist(), (lengths * size).tolist(), (at * size).tolist(), strict=True)
    for start, nbytes, first in places:
        target[first : first + nbytes] = source[start : start + nbytes]


def copy_rows(data: np.ndarray, starts: np.ndarray, length: int, out: np.ndarray, rows: np.ndarray) -> None:
    """data[start:start + length] to row number `rows[i]` of `length` in `out`, for each of (n,).

    A window is one number of many bytes here: fancy indexing copies those fastest. It has no `out`, so a few are copied
    at once, which stay in the processor's own memory. (np.take has one, and would first copy all windows there are.)
    """
    size = _get_token_size(data, out)
    window = np.dtype(f"V{length * size}")
    windows = np.ndarray((len(data) - length + 1,), window, data, 0, (size,))
    target, each = out.view(window), max(1, AT_ONCE // window.itemsize)
    for first in range(0, len(starts), each):
        here = rows[first : first + each]
        chunk = windows[starts[first : first + each]]
        if here[-1] - here[0] == len(here) - 1:  # one behind another, as they ascend
            target[here[0] : here[-1] + 1] = chunk
        else:
            target[here] = chunk


def _get_token_size(data: np.ndarray, out: np.ndarray) -> int:
    """Bytes of a token."""
    if data.dtype != out.dtype:
        raise TypeError(f"tokens of {data.dtype} into memory of {out.dtype}")
    return data.itemsize
