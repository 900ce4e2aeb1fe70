"""Base of tokens in external formats: identified by sampled blocks, checked against the model's vocabulary."""

from __future__ import annotations

import os
import stat
from abc import ABC
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gangline import UserError
from gangline_dataloader.store import npy
from gangline_dataloader.store.tokens import Sharded
from gangline_dataloader.store.watch import WatchedFiles

PIECES_OF_IDENTITY = 64  # number of blocks of a file that are hashed into its identity
PROBE = 1 << 16  # leading bytes from which the dtype of tokens is guessed
HIGH = 16  # upper bound of the upper halves of uint32 tokens, for vocabularies up to 2^20


class ExternalTokens(Sharded, ABC):
    """Tokens in an external format.

    Such files have no checksum and no vocabulary. The identity is a hash of sizes and of some blocks of each file, so
    that a change in another block is not detected. Each token is checked against the model's vocabulary when read.

    watched           detects changes of the files since they were opened
    documents_before  (shards,) number of the first document of each shard, empty documents included
    """

    ranged = True
    watched: WatchedFiles
    documents_before: np.ndarray

    def look_again(self) -> None:
        self.watched.look()

    def copy(self, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, at: np.ndarray) -> None:
        super().copy(starts, stops, out, at)
        # one check if the ranges are adjacent in `out`, as in complete batches
        first, end = int(at.min()), int((at + stops - starts).max())
        whole = end - first == int((stops - starts).sum())
        for low, high in [(first, end)] if whole else zip(at.tolist(), (at + stops - starts).tolist(), strict=True):
            self._check(out[low:high])

    def _check(self, tokens: np.ndarray) -> None:
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            bad = int(tokens.max()) if tokens.max() >= self.vocab_size else int(tokens.min())
            raise UserError(
                f"{self.name} contains token {bad}, outside the model's vocabulary of {self.vocab_size} tokens.",
                "The file was written with another tokenizer, or is not in the expected format.",
                "Token ids must be at least 0." if bad < 0 else "Increase model.vocab_size.",
            )

    def find_document(self, token: int) -> int | None:
        if self.documents is None:
            return None
        shard = int(np.searchsorted(self._starts, token, side="right")) - 1
        inside = np.searchsorted(self.get_all_ends(shard), token - self._starts[shard], side="right")
        return int(self.documents_before[shard]) + int(inside)

    def list_documents(self, start: int, stop: int) -> list[int]:
        places = [start, *self.find_document_ends(start, stop - 1).tolist()]
        return [number for number in map(self.find_document, places) if number is not None]

    def get_all_ends(self, shard: int) -> np.ndarray:
        """Return the ends of all documents of a shard, empty documents included; overridden by some formats."""
        ends = self.shard_ends(shard)
        return np.empty(0, np.int64) if ends is None else ends


class Vector(ExternalTokens):
    """Tokens of a mapped file from byte `offset` on; `ends`: document ends, also of empty documents; None: unknown."""

    def __init__(
        self, file: Path, dtype: str, offset: int, length: int, vocab_size: int, ends: np.ndarray | None
    ) -> None:
        if not length:
            raise UserError(f"{file} contains no tokens.")
        self.file, self.name, self.offset, self._all_ends = file, str(file), offset, ends
        self._ends = None if ends is None else ends[np.diff(ends, prepend=0) > 0]
        self.documents_before = np.zeros(1, np.int64)
        self.watched = WatchedFiles()
        self.watched.add(file, None)
        digest = blake2b(f"{dtype} {offset} {length}".encode(), digest_size=16)
        digest.update(b"" if self._ends is None else self._ends.tobytes())
        sample(file, digest, PIECES_OF_IDENTITY)
        super().__init__(
            [length],
            np.dtype(dtype),
            vocab_size=vocab_size,
            end_of_text=None,
            identity=digest.hexdigest(),
            documents=None if ends is None else len(ends),
        )

    def open(self, shard: int) -> np.ndarray:
        self.watched.look_at(self.file)
        return np.memmap(self.file, self.dtype, "r", self.offset, (self.total,))

    def open_ends(self, shard: int) -> np.ndarray | None:
        return self._ends

    def get_all_ends(self, shard: int) -> np.ndarray:
        return np.empty(0, np.int64) if self._all_ends is None else self._all_ends


def sample(file: Path, digest: blake2b, pieces: int) -> None:
    """Sample `pieces` evenly spaced blocks of a file into a hash. Raises UserError like `open_regular`."""
    with open_regular(file) as stream:
        npy.sample(stream, digest, pieces)


def get_file_size(file: Path) -> int:
    """Return the size of a file in bytes. Raises UserError like `open_regular`."""
    with open_regular(file) as stream:
        return os.fstat(stream.fileno()).st_size


def open_regular(file: Path) -> BinaryIO:
    """Open a file to read its bytes. Raises UserError if it is not a regular file or cannot be read."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait for its writer
            raise UserError(
                f"{file} is not a regular file.",
                "A pipe or a device cannot be memory-mapped.",
                "Copy the content into a file.",
            )
        return file.open("rb")
    except OSError as error:
        raise UserError(f"{file} cannot be read.", error.strerror or str(error)) from error


def seem_wide(content: np.ndarray, size: int) -> bool:
    """Return whether bytes seem to be tokens of `size` bytes: numbers whose upper halves are almost 0."""
    values, bits = content[: len(content) // size * size].view(f"<u{size}"), min(4 * size, 16)
    return len(values) >= HIGH and bool(values.max() < HIGH << bits and (values & (1 << bits) - 1).max() >= HIGH)
