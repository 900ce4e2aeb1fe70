"""A token store in a directory."""

from __future__ import annotations

from pathlib import Path

from gangline_dataloader.store.stored import StoreTokens


class LocalTokens(StoreTokens):
    """Every file lies in the store's directory."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(Path(folder).expanduser(), str(folder))

    def locate(self, name: str, nbytes: int, xxh3: str) -> Path:
        return self.folder / name
