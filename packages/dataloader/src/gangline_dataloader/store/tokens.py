"""A corpus as one vector of tokens across its shards, with methods that copy windows and find document ends.

N rows (windows), T tokens of a sequence. Independent of seeds, epochs and ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

AT_ONCE = 1 << 18  # bytes of windows that are copied at once
FEW = 8  # minimum mean number of windows per shard for which one gather per shard is faster


class Tokens(ABC):
    """All tokens of a corpus, numbered from 0, in stored width."""

    dtype: np.dtype
    total: int  # number of tokens
    vocab_size: int
    end_of_text: int | None  # token after each document; None: no token
    identity: str  # hash of the data
    documents: int | None  # number of documents; None: unknown
    distant: bool = False  # whether the store is remote, so that `announce` starts to fetch
    masked: bool = False  # whether there is a loss mask: only some tokens are trained on
    ranged: bool = False  # whether `copy` itself checks tokens against the vocabulary
    name: str  # path or URL for messages

    @abstractmethod
    def copy(self, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
        """Copy token ranges [start, stop) (n,): each range to out[at:at + stop - start].

        `out` (M,) is contiguous and has the dtype of the tokens. All ranges lie inside the corpus.
        """

    def copy_loss_mask(self, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
        """Copy the loss mask of token ranges like `copy`: uint8, 1 for a token that is trained on."""
        for first, length in zip(at.tolist(), (stops - starts).tolist(), strict=True):
            out[first : first + length] = 1

    def copy_windows(self, starts: np.ndarray, length: int, out: np.ndarray) -> None:
        """Fill `out` (N, length) with windows of `length` tokens that begin at `starts` (N,)."""
        self.copy(starts, starts + length, out.reshape(-1), np.arange(len(starts)) * length)

    @abstractmethod
    def find_document_ends(self, start: int, stop: int) -> np.ndarray:
        """Find the exclusive ends of documents in (start, stop], ascending int64; empty if they are unknown."""

    @abstractmethod
    def find_borders(self, starts: np.ndarray, length: int, at: np.ndarray) -> np.ndarray:
        """Return the sorted document ends inside the windows (start, start + length], (n,) int64.

        starts, at (N,): an end in window i is returned as at[i] + end - starts[i], where at[i] is the offset of window
        i in the output.
        """

    def announce(self, starts: np.ndarray) -> None:
        """Announce the starts of windows that will be read soon, so that a remote store prefetches their shards."""

    def look_again(self) -> None:
        """Check from time to time whether files have changed since they were opened. Raises UserError if so."""

    def find_document(self, token: int) -> int | None:
        """Find the number of the document that a token is in, counted from 0; None if it is unknown."""
        return None

    def list_documents(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the documents with tokens in [start, stop), ascending; [] if they are unknown."""
        first, last = self.find_document(start), self.find_document(stop - 1)
        return [] if first is None or last is None else list(range(first, last + 1))

    def compute_ends(self) -> np.ndarray:
        """Return the cumulative number of tokens at the end of each shard, (S,) int64.

        A corpus that cannot grow counts as one shard.
        """
        return np.array([self.total], np.int64)

    def count_rows(self, length: int) -> int:
        """Count the sequences of `length` tokens, each with one more token as the last target."""
        return max(0, (self.total - 1) // length)


class Sharded(Tokens):
    """Tokens in consecutive shards; a method of the subclass opens a shard when the shard is first read.

    lengths  number of tokens of each shard
    keep     maximum number of shards that are open at a time; None: all, for mapped files
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
        """Open the tokens of one shard."""

    @abstractmethod
    def open_ends(self, shard: int) -> np.ndarray | None:
        """Open the exclusive document ends of one shard, ascending; None if they are unknown."""

    def open_loss(self, shard: int) -> np.ndarray:
        """Open the loss mask of one shard, uint8; called only if `masked`."""
        raise NotImplementedError

    def copy(self, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
        self._copy(self.shard, starts, stops, out, at)

    def copy_loss_mask(self, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
        if self.masked:
            self._copy(self.shard_loss, starts, stops, out, at)
        else:
            super().copy_loss_mask(starts, stops, out, at)

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
        # Rows of few shards are gathered; rows of many shards, and ranges of different lengths, are copied one by one.
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
            order = np.argsort(first)  # each search then begins near the end of the previous search, in cached memory
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
        """Group ranges [start, stop) by shard: ([(shard, indices of its ranges)], indices of ranges across shards)."""
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
    """Return the number of the ascending `ends` that are at most each of `places`.

    `places` is cast to the dtype of `ends`, because numpy would otherwise copy `ends`.
    """
    return np.searchsorted(ends, places.astype(ends.dtype), side="right")


def copy_pieces(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
    """Copy data[start:start + length] to out[at:at + length], for each of n ranges."""
    size = _get_token_size(data, out)
    # memoryview slices, because each numpy copy would release the GIL and wait for it.
    source, target = data.data.cast("B"), out.data.cast("B")
    places = zip((starts * size).tolist(), (lengths * size).tolist(), (at * size).tolist(), strict=True)
    for start, nbytes, first in places:
        target[first : first + nbytes] = source[start : start + nbytes]


def copy_rows(data: np.ndarray, starts: np.ndarray, length: int, out: np.ndarray, rows: np.ndarray) -> None:
    """Copy data[start:start + length] to row `rows[i]` of `out` (rows of `length` tokens), for each of n windows.

    A window is viewed as one item of many bytes, which fancy indexing copies fastest. Indexing has no `out` argument,
    so windows are copied in batches that fit the CPU cache. (np.take has `out`, but first copies all of `data`.)
    """
    size = _get_token_size(data, out)
    window = np.dtype(f"V{length * size}")
    windows = np.ndarray((len(data) - length + 1,), window, data, 0, (size,))
    target, each = out.view(window), max(1, AT_ONCE // window.itemsize)
    for first in range(0, len(starts), each):
        here = rows[first : first + each]
        chunk = windows[starts[first : first + each]]
        if here[-1] - here[0] == len(here) - 1:  # adjacent rows, because they ascend
            target[here[0] : here[-1] + 1] = chunk
        else:
            target[here] = chunk


def _get_token_size(data: np.ndarray, out: np.ndarray) -> int:
    """Return the bytes of a token. Raises TypeError if the dtypes differ."""
    if data.dtype != out.dtype:
        raise TypeError(f"cannot copy tokens of {data.dtype} to an array of {out.dtype}")
    return data.itemsize
