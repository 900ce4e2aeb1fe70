"""Order of rows: a random permutation per epoch, which depends only on (seed, split, epoch). Torch-free."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np


class RowOrder:
    """Map from the index i of a sample in the run to one of `count` rows."""

    def __init__(self, count: int, seed: int, split: str) -> None:
        self.count, self.seed, self.split = count, seed, split
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def get_row(self, i: int) -> int:
        epoch, turn = divmod(i, self.count)
        return int(self._epoch(epoch)[turn])

    def _draw(self, epoch: int) -> np.ndarray:
        """Draw a permutation from the raw output of Philox, which is equal in every version of numpy."""
        key = blake2b(f"{self.seed}\0{self.split}\0{epoch}".encode(), digest_size=16).digest()
        return np.argsort(np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(self.count), kind="stable")
