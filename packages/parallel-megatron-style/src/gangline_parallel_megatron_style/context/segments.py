"""Segments of a block of ring attention: ranges of queries and keys that an attention kernel computes without a mask.

A run is a range of tokens of one document; with a window, also of consecutive positions. A segment has the queries of
one run and the keys of one run. Its queries see all of its keys, or

    causal       query i sees keys 0 to i; such a segment has as many keys as queries
    left         query i of n sees keys j >= i + m - n - left of m: a window, counted from the last query and key

The segments of a group have one `causal` and one `left`, so one call of a kernel computes all of them. No two segments
of a group have a query or a key in common.

B batch, T queries, S keys
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
EVERY = -1  # value of `left` if a window hides no key of a segment


class AttentionSegment(NamedTuple):
    """A row of the batch, and ranges [from, to) of queries and keys."""

    row: int
    query: int
    query_end: int
    key: int
    key_end: int


class SegmentGroup(NamedTuple):
    """Segments that one call of a kernel computes."""

    segments: tuple[AttentionSegment, ...]
    causal: bool
    left: int


class BlockTokens(NamedTuple):
    """Documents and positions (B, T) of queries or keys; positions are read only with a window."""

    document: Numbers | None
    position: Numbers | None


def group_segments(
    queries: BlockTokens, keys: BlockTokens, window: int | None, causal: bool
) -> tuple[SegmentGroup, ...]:
    """Return the segments of a block, in groups. Query-key pairs in no segment are hidden.

    window  sliding window (`AttentionCall`); None: no window
    causal  whether queries and keys are the same tokens, and a query sees no later key; otherwise all keys are earlier
    """
    open_groups: list[_OpenGroup] = []
    shapes = _get_shape(queries), _get_shape(keys)
    for row in range(shapes[0][0]):
        for place, diagonal, left in _iterate_segments(_get_row(queries, row), _get_row(keys, row), window, causal):
            segment = AttentionSegment(row, *place)
            for group in open_groups:
                if (group.causal, group.left) == (diagonal, left) and group.has_room(segment):
                    break
            else:
                group = _OpenGroup(diagonal, left, *shapes)
                open_groups.append(group)
            group.add(segment)
    return tuple(SegmentGroup(tuple(group.segments), group.causal, group.left) for group in open_groups)


class _OpenGroup:
    """A group to which segments are added."""

    def __init__(self, causal: bool, left: int, queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
        self.causal, self.left = causal, left
        self.segments: list[AttentionSegment] = []
        self._queries, self._keys = np.zeros(queries, dtype=bool), np.zeros(keys, dtype=bool)

    def has_room(self, one: AttentionSegment) -> bool:
        """Return whether the group has none of the segment's queries and keys."""
        queries, keys = self._queries[one.row, one.query : one.query_end], self._keys[one.row, one.key : one.key_end]
        return not queries.any() and not keys.any()

    def add(self, one: AttentionSegment) -> None:
        self.segments.append(one)
        self._queries[one.row, one.query : one.query_end] = True
        self._keys[one.row, one.key : one.key_end] = True


def _get_shape(tokens: BlockTokens) -> tuple[int, ...]:
    array = tokens.position if tokens.document is None else tokens.document
    assert array is not None, "a block without documents and without a window needs no segments"
    return array.shape


def _get_row(tokens: BlockTokens, row: int) -> BlockTokens:
    return BlockTokens(*(None if x is None else x[row] for x in tokens))


def _iterate_segments(
    queries: BlockTokens, keys: BlockTokens, window: int | None, causal: bool
) -> Iterator[tuple[tuple[int, int, int, int], bool, int]]:
    """Yield ((query, query end, key, key end), causal, left) of a row."""
    positions = window is not None
    key_runs: dict[int, list[tuple[int, int, int]]] = {}
    for number, (key, key_end) in enumerate(_split_runs(keys, positions)):
        key_runs.setdefault(_get_document(keys, key), []).append((number, key, key_end))
    for number, (query, query_end) in enumerate(_split_runs(queries, positions)):
        for key_number, key, key_end in key_runs.get(_get_document(queries, query), ()):
            if causal and key_number >= number:
                if key_number == number:
                    yield (query, query_end, key, key_end), True, EVERY if window is None else window - 1
                continue
            if window is None:
                yield (query, query_end, key, key_end), False, EVERY
                continue
            assert queries.position is not None
            assert keys.position is not None
            offset = int(queries.position[query] - keys.position[key])
            trimmed = _find_visible_range(query_end - query, key_end - key, offset, window)
            if trimmed is not None:
                seeing, first, left = trimmed
                yield (query, query + seeing, key + first, key_end), False, left


def _find_visible_range(queries: int, keys: int, offset: int, window: int) -> tuple[int, int, int] | None:
    """Return (number of queries that see a key, first key that a query sees, left); None if all keys are hidden.

    offset: position of the first query minus position of the first key. Query i sees key j if i + offset - j < window.
    """
    seeing = min(queries, keys + window - 1 - offset)
    if seeing <= 0:
        return None
    if queries - 1 + offset < window:
        return seeing, 0, EVERY
    return seeing, max(0, offset - window + 1), keys - seeing - offset + window - 1


def _split_runs(tokens: BlockTokens, positions: bool) -> list[tuple[int, int]]:
    """Return the ranges [from, to) of the runs of a row. positions: whether a run has consecutive positions."""
    changes = []
    if tokens.document is not None:
        changes.append(np.diff(tokens.document) != 0)
    if positions and tokens.position is not None:
        changes.append(np.diff(tokens.position) != 1)
    ends = np.flatnonzero(np.logical_or.reduce(changes)) + 1
    size = len(changes[0]) + 1
    edges = [0, *ends.tolist(), size]
    return list(pairwise(edges))


def _get_document(tokens: BlockTokens, place: int) -> int:
    return 0 if tokens.document is None else int(tokens.document[place])
