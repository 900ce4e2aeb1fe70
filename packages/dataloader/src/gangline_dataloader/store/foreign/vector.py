"""One file with tokens from some byte on."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import numpy as np

from gangline.errors import UserError
from gangline_dataloader.store.tokens import Sharded

PIECES, PIECE = 64, 1 << 12  # of a file, whose bytes tell it from others


class Vector(Sharded):
    """Tokens of one file, mapped; `ends` of its documents where somebody knows them.

    Nobody wrote down a checksum or a vocabulary: the identity is a hash of the file's size and of 64 pieces of it, so
    that a change between them is not seen, and each token is held against the model's vocabulary when it is read.
    """

    def __init__(
        self, file: Path, dtype: str, offset: int, length: int, vocab_size: int, ends: np.ndarray | None
    ) -> None:
        if not length:
            raise UserError(f"{file} holds no tokens.")
        self.file, self.offset, self._ends = file, offset, ends
        size = file.stat().st_size
        digest = blake2b(f"{dtype} {offset} {length}".encode(), digest_size=16)
        digest.update(b"" if ends is None else ends.tobytes())
        with file.open("rb") as opened:
            for place in np.linspace(0, max(0, size - PIECE), PIECES, dtype=np.int64).tolist():
                opened.seek(place)
                digest.update(opened.read(PIECE))
        super().__init__(
            [length],
            np.dtype(dtype),
            vocab_size=vocab_size,
            end_of_text=None,
            identity=digest.hexdigest(),
            documents=None if ends is None else len(ends),
        )

    def open(self, shard: int) -> np.ndarray:
        return np.memmap(self.file, self.dtype, "r", self.offset, (self.total,))

    def open_ends(self, shard: int) -> np.ndarray | None:
        return self._ends

    def windows(self, starts: np.ndarray, length: int, out: np.ndarray, rows: np.ndarray | None = None) -> None:
        super().windows(starts, length, out, rows)
        out = out if rows is None or len(rows) == len(out) else out[rows]
        if out.size and (out.max() >= self.vocab_size or out.min() < 0):
            bad = int(out.max()) if out.max() >= self.vocab_size else int(out.min())
            raise UserError(
                f"{self.file} has token {bad}, and the model's vocabulary has {self.vocab_size}.",
                "The file is of another tokenizer, or not of the format that it seems to be.",
                "Choose a larger model.vocab_size.",
            )

    def document_of(self, token: int) -> int | None:
        return None if self._ends is None else int(np.searchsorted(self._ends, token, side="right"))


def size_of(file: Path) -> int:
    """In bytes. Raises UserError where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise UserError(f"{file} cannot be read.", error.strerror or str(error)) from error
