"""Best-fit-decreasing packing of documents into rows of a fixed size, with few documents split and little padding.

Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830, section 3: a document that is longer than
a row is split into rows, and the remaining pieces are packed, the longest first, each into the row with the least
free space that still holds the piece. Torch-free.
"""

from __future__ import annotations

import numpy as np


def split_documents(ends: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Split documents that end at `ends` (D,) into pieces: starts and lengths of the pieces, both (P,) int64, in order.

    capacity  length of a row in tokens. A longer document is split, and each piece begins with the last token of the
              previous piece, so that each token of the document but the first is a target exactly once.
    """
    ends = np.asarray(ends, np.int64)
    lengths = np.diff(ends, prepend=0)
    step = capacity - 1
    count = np.maximum(1, -(-(lengths - 1) // step))
    document = np.repeat(np.arange(len(ends)), count)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    starts = (ends - lengths)[document] + nth * step
    return starts, np.minimum(capacity, ends[document] - starts)


def pack_best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pack pieces of 1 to `capacity` tokens and return the row of each piece (P,); rows are numbered from 0, unordered.

    Takes linear time: the row for a piece is found in a bit mask with one bit for each number of free tokens.
    """
    lengths = np.asarray(lengths, np.int64)
    rows = np.empty(len(lengths), np.int64)
    full = np.flatnonzero(lengths == capacity)
    rows[full] = np.arange(len(full))
    count = len(full)
    short_pieces = np.flatnonzero(lengths < capacity)
    order = short_pieces[np.argsort(-lengths[short_pieces], kind="stable")]
    with_room: list[list[int]] = [[] for _ in range(capacity)]  # free tokens -> rows with that many free tokens
    rooms = 0  # bit r: whether a row with r free tokens exists
    placements = []
    for need in lengths[order].tolist():
        large_enough = rooms >> need
        if large_enough:
            room = need + (large_enough & -large_enough).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            row, room, count = count, capacity, count + 1
        placements.append(row)
        if room > need:
            with_room[room - need].append(row)
            rooms |= 1 << (room - need)
    rows[order] = placements
    return rows


def pack_documents(ends: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents that end at `ends` (D,) into rows: (pieces (P, 2) uint32, rows (R,) uint32).

    Pieces are (start, length), row after row; rows[r] is the number of pieces in rows 0 to r. Rows are sorted
    by their first token, and the pieces of a row by their start.
    """
    starts, lengths = split_documents(ends, capacity)
    rows = pack_best_fit(lengths, capacity)
    first = np.full(int(rows.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, rows, starts)
    order = np.lexsort((starts, first[rows]))
    pieces = np.stack([starts[order], lengths[order]], 1).astype(np.uint32)
    last = np.flatnonzero(np.diff(first[rows][order], append=-1))
    return pieces, (last + 1).astype(np.uint32)
