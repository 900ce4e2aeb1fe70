"""A corpus as one long vector of tokens, wherever its shards lie: what a window of it holds, and where documents end.

N rows (windows), T tokens of a sequence. Nothing here knows of seeds, epochs or ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np


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

    @abstractmethod
    def windows(self, starts: np.ndarray, length: int, out: np.ndarray, rows: np.ndarray | None = None) -> None:
        """Fill out (N, length), or these rows of it, with the tokens from each of `starts` (N,) on.

        All lie inside the corpus.
        """

    @abstractmethod
    def ends(self, start: int, stop: int) -> np.ndarray:
        """Exclusive ends of documents in (start, stop], ascending int64; empty where nobody knows them."""

    @abstractmethod
    def ends_in(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`ends` in (start, start + length] for each of `starts` (N,): (its number, end - start), both (n,)."""

    def counted(self, starts: np.ndarray, length: int, out: np.ndarray, rows: np.ndarray | None = None) -> None:
        """As `windows`, uint8: 1 for a token that is to be learnt."""
        out[slice(None) if rows is None else rows] = 1

    def announce(self, starts: np.ndarray) -> None:
        """Tokens from which windows will be read soon. Nothing to do where they are mapped."""

    def document_of(self, token: int) -> int | None:
        """The number of the document that a token is in, counted from 0; None where nobody knows."""
        return None

    def rows(self, length: int) -> int:
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
        self._view = lru_cache(keep)(self._make_view)

    @abstractmethod
    def open(self, shard: int) -> np.ndarray:
        """The tokens of one shard."""

    @abstractmethod
    def open_ends(self, shard: int) -> np.ndarray | None:
        """The exclusive ends of its documents, ascending; None where nobody knows them."""

    def open_loss(self, shard: int) -> np.ndarray:
        """Which of its tokens are to be learnt, uint8; asked where `masked`."""
        raise NotImplementedError

    def windows(self, starts: np.ndarray, length: int, out: np.ndarray, rows: np.ndarray | None = None) -> None:
        self._gather(self.shard, starts, length, out, rows)

    def counted(self, starts: np.ndarray, length: int, out: np.ndarray, rows: np.ndarray | None = None) -> None:
        if self.masked:
            self._gather(self.shard_loss, starts, length, out, rows)
        else:
            super().counted(starts, length, out, rows)

    def _gather(
        self,
        opened: Callable[[int], np.ndarray],
        starts: np.ndarray,
        length: int,
        out: np.ndarray,
        rows: np.ndarray | None,
    ) -> None:
        shards, across = self._by_shard(starts, length)
        for shard, here in shards:
            # Fancy indexing copies whole windows; np.take would first copy the view, which is `length` corpora large.
            copied = self._view(opened, shard, length)[starts[here] - self._starts[shard]]
            if len(here) == len(out):
                out[:] = copied
            else:
                out[here if rows is None else rows[here]] = copied
        for row in across:
            self._across(opened, int(starts[row]), length, out[row if rows is None else rows[row]])

    def _make_view(self, opened: Callable[[int], np.ndarray], shard: int, length: int) -> np.ndarray:
        return np.lib.stride_tricks.sliding_window_view(opened(shard), length)

    def _across(self, opened: Callable[[int], np.ndarray], start: int, length: int, out: np.ndarray) -> None:
        """A window that lies in more than one shard."""
        done = 0
        while done < length:
            shard = int(np.searchsorted(self._starts, start + done, side="right")) - 1
            offset = start + done - int(self._starts[shard])
            part = opened(shard)[offset : offset + length - done]
            out[done : done + len(part)] = part
            done += len(part)

    def ends(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        found = []
        for shard in range(int(first), int(last) + 1):
            ends, base = self.shard_ends(shard), int(self._starts[shard])
            if ends is None:
                continue
            low, high = _behind(ends, np.array([max(0, start - base), min(stop - base, self._shard_length(shard))]))
            found.append(ends[low:high].astype(np.int64) + base)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def ends_in(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        shards, rest = self._by_shard(starts, length)
        found = []
        for shard, here in shards:
            ends = self.shard_ends(shard)
            if ends is None:
                continue
            first = starts[here] - self._starts[shard]
            low, high = _behind(ends, first), _behind(ends, first + length)
            counts = high - low
            number = np.repeat(np.arange(len(here)), counts)
            at = np.arange(len(number)) + (low - np.cumsum(counts) + counts)[number]
            found.append((here[number], ends[at].astype(np.int64) - first[number]))
        for row in rest:
            start = int(starts[row])
            across = self.ends(start, start + length) - start
            found.append((np.full(len(across), row), across))
        return by_row(found)

    def _by_shard(self, starts: np.ndarray, length: int) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
        """([(shard, which of the windows lie in it)], which lie in several)."""
        shard_of = np.searchsorted(self._starts, starts, side="right") - 1
        inside = starts + length <= self._starts[shard_of + 1]
        if inside.all() and len(shard_of) and (shard_of == shard_of[0]).all():
            return [(int(shard_of[0]), np.arange(len(starts)))], np.empty(0, np.int64)
        found = [(int(one), np.flatnonzero(inside & (shard_of == one))) for one in np.unique(shard_of[inside])]
        return found, np.flatnonzero(~inside)

    def _shard_length(self, shard: int) -> int:
        return int(self._starts[shard + 1] - self._starts[shard])


def by_row(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of (row, end), both (n,), as one pair in order of row."""
    if len(found) == 1:
        return found[0]
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    row, end = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(row, kind="stable")
    return row[order], end[order]


def _behind(ends: np.ndarray, places: np.ndarray) -> np.ndarray:
    """How many of the ascending `ends` are at most each place; in their dtype, or numpy would copy all of them."""
    return np.searchsorted(ends, places.astype(ends.dtype), side="right")
