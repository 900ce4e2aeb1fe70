"""Base of token stores that `gangline data prepare` made, local or remote."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gangline_dataloader.store import manifest as manifests
from gangline_dataloader.store.manifest import Manifest, name_ends_file, name_loss_file, name_tokens_file
from gangline_dataloader.store.npy import compute_file_size
from gangline_dataloader.store.tokens import Sharded


class StoreTokens(Sharded, ABC):
    """The tokens of a store. Opening it reads only the manifest.

    When a file is first read, it is mapped and its checksum verified: the checksum of all bytes, or, for a file of
    tokens above `npy.WHOLE` bytes, the sampled checksum, if the manifest has one.

    folder  local folder with the manifest, the tokenizer and the plans
    name    path or URL of the store, for messages
    keep    maximum number of shards that are mapped at a time; None: all
    Raises UserError if the manifest is damaged, and when a damaged file is mapped.
    """

    def __init__(self, folder: Path, name: str, keep: int | None = None) -> None:
        self.folder, self.name = folder, name
        self.manifest: Manifest = manifests.read(folder, name if self.distant else "")
        super().__init__(
            self.manifest.shards.tokens,
            np.dtype(self.manifest.dtype),
            vocab_size=self.manifest.vocab_size,
            end_of_text=self.manifest.tokenizer.end_of_text,
            identity=self.manifest.compute_identity(),
            documents=self.manifest.documents,
            keep=keep,
        )
        self.masked = bool(self.manifest.shards.loss_xxh3)

    @abstractmethod
    def map_shard_file(
        self, name: str, dtype: str, length: int, xxh3: str, pieces_xxh3: str | None = None
    ) -> np.ndarray:
        """Map the vector (length,) in a file of the store and compare it with its checksums (`npy.map_vector`).

        Raises UserError if the file does not match the manifest.
        """

    @abstractmethod
    def find_file_sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        """Find the actual sizes of files in bytes; None for a missing file. Files of unknown size are left out."""

    def get_expected_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each shard file by name, as the manifest says."""
        sizes, shards = {}, self.manifest.shards
        for number, (tokens, documents) in enumerate(zip(shards.tokens, shards.documents, strict=True)):
            sizes[name_tokens_file(number)] = compute_file_size(self.dtype, tokens)
            sizes[name_ends_file(number)] = compute_file_size("<u4", documents)
            if self.masked:
                sizes[name_loss_file(number)] = compute_file_size("|u1", tokens)
        return sizes

    def compute_ends(self) -> np.ndarray:
        return self._starts[1:]

    def open(self, shard: int) -> np.ndarray:
        entry = self.manifest.shards[shard]
        return self.map_shard_file(
            name_tokens_file(shard), self.manifest.dtype, entry.tokens, entry.xxh3, entry.pieces_xxh3
        )

    def open_ends(self, shard: int) -> np.ndarray | None:
        entry = self.manifest.shards[shard]
        return self.map_shard_file(name_ends_file(shard), "<u4", entry.documents, entry.ends_xxh3)

    def open_loss(self, shard: int) -> np.ndarray:
        entry = self.manifest.shards[shard]
        return self.map_shard_file(name_loss_file(shard), "|u1", entry.tokens, entry.loss_xxh3 or "")

    def find_document(self, token: int) -> int | None:
        shard = int(np.searchsorted(self._starts, token, side="right")) - 1
        ends = self.shard_ends(shard)
        assert ends is not None, "a token store has document ends"
        inside = np.searchsorted(ends, token - self._starts[shard], side="right")
        return sum(self.manifest.shards.documents[:shard]) + int(inside)
