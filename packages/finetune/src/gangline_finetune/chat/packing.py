"""Packing of chats into rows of a fixed size, with little padding. Torch-free.

Best-fit decreasing (Ding et al., arXiv 2404.10830, section 3): the longest chat first, each into the row with the
least free space that is sufficient.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return the indices of the chats in each row, sorted. lengths: tokens of each chat, from 1 to `capacity`."""
    rooms: list[tuple[int, int]] = []  # (free tokens, row), ascending
    rows: list[list[int]] = []
    for piece in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        need = int(lengths[piece])
        at = bisect_left(rooms, (need, -1))
        if at < len(rooms):
            room, row = rooms.pop(at)
            rows[row].append(piece)
        else:
            room, row = capacity, len(rows)
            rows.append([piece])
        if room > need:
            insort(rooms, (room - need, row))
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])
