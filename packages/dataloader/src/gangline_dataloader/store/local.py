"""Token store in a local directory, with mapped shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from gangline_dataloader.store.npy import map_vector
from gangline_dataloader.store.stored import StoreTokens
from gangline_dataloader.store.watch import WatchedFiles, find_status


class LocalTokens(StoreTokens):
    """The tokens of a store in a local directory."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(Path(folder).expanduser(), str(folder))
        self._watched = WatchedFiles()

    def look_again(self) -> None:
        self._watched.look()

    def find_file_sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        sizes: dict[str, int | None] = dict.fromkeys(names)
        for name in names:
            with suppress(FileNotFoundError):
                sizes[name] = (self.folder / name).stat().st_size
        return sizes

    def map_shard_file(
        self, name: str, dtype: str, length: int, xxh3: str, pieces_xxh3: str | None = None
    ) -> np.ndarray:
        path = self.folder / name
        before = find_status(path)
        vector = map_vector(path, dtype, length, xxh3, pieces_xxh3)
        self._watched.add(path, xxh3, before)
        return vector
