"""A token store in a directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gangline_dataloader.store.npy import mapped
from gangline_dataloader.store.stored import StoreTokens


class LocalTokens(StoreTokens):
    """Every file lies in the store's directory."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(Path(folder).expanduser(), str(folder))

    def file(self, name: str, dtype: str, length: int, xxh3: str) -> np.ndarray:
        return mapped(self.folder / name, dtype, length)
