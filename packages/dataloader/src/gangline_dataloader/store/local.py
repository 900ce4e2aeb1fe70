"""A token store in a directory: opened in constant time and memory, whatever its size."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gangline_dataloader.store import manifest as manifests
from gangline_dataloader.store.manifest import Manifest, ends_of, file_of
from gangline_dataloader.store.npy import mapped
from gangline_dataloader.store.tokens import Sharded


class LocalTokens(Sharded):
    """The shards of a directory, each mapped when it is first read.

    Raises UserError where the manifest, or a file when it is mapped, is not what it should be.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.manifest: Manifest = manifests.read(folder)
        super().__init__(
            self.manifest.shards.tokens,
            np.dtype(self.manifest.dtype),
            vocab_size=self.manifest.vocab_size,
            end_of_text=self.manifest.tokenizer.end_of_text,
            identity=self.manifest.identity(),
            documents=self.manifest.documents,
        )

    def open(self, shard: int) -> np.ndarray:
        return mapped(self.folder / file_of(shard), self.manifest.dtype, self.manifest.shards.tokens[shard])

    def open_ends(self, shard: int) -> np.ndarray | None:
        return mapped(self.folder / ends_of(shard), "<u4", self.manifest.shards.documents[shard])

    def document_of(self, token: int) -> int | None:
        shard = int(np.searchsorted(self._starts, token, side="right")) - 1
        ends = self.shard_ends(shard)
        assert ends is not None, "a store of ours knows where documents end"
        inside = np.searchsorted(ends, token - self._starts[shard], side="right")
        return sum(self.manifest.shards.documents[:shard]) + int(inside)
