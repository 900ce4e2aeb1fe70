"""Best-fit decreasing: documents into rows of a fixed size, as few cut and as little left empty as can be had cheaply.

Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830, section 3: a document that is longer than
a row is cut into rows, and all that is left is packed, the longest first, each into the row with the least room that
still holds it. Torch-free.
"""

from __future__ import annotations

import numpy as np


def split_documents(ends: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents that end at `ends` (D,) -> where the pieces (P,) begin and how long they are, both int64, in order.

    capacity  tokens of a row. A longer document is cut, the next piece beginning with the last token of the one before,
              so that each of its tokens but the first is the target of the one in front of it, once.
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
    """The row of each piece (P,), rows numbered from 0 in no order. Pieces have 1 to `capacity` tokens.

    Linear in the pieces: rows that are open are found by the room they have left, one bit for each room.
    """
    lengths = np.asarray(lengths, np.int64)
    rows = np.empty(len(lengths), np.int64)
    full = np.flatnonzero(lengths == capacity)
    rows[full] = np.arange(len(full))
    count = len(full)
    short_pieces = np.flatnonzero(lengths < capacity)
    order = short_pieces[np.argsort(-lengths[short_pieces], kind="stable")]
    with_room: list[list[int]] = [[] for _ in range(capacity)]  # room -> rows that have it
    rooms = 0  # bit r: some row has room r
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
    """The rows of some documents: pieces (P, 2) uint32, start and length, row after row, and (R,) uint32, the number of
    pieces up to the end of each row. Rows are in the order of their first token, and so are the pieces of a row.
    """
    starts, lengths = split_documents(ends, capacity)
    rows = pack_best_fit(lengths, capacity)
    first = np.full(int(rows.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, rows, starts)
    order = np.lexsort((starts, first[rows]))
    pieces = np.stack([starts[order], lengths[order]], 1).astype(np.uint32)
    last = np.flatnonzero(np.diff(first[rows][order], append=-1))
    return pieces, (last + 1).astype(np.uint32)
