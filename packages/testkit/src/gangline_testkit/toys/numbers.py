"""Toy data source: counting numbers as text."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from gangline.config.schema import Run
from gangline.data.base import DataSource, Split
from gangline.data.sample import Sample
from gangline.errors import UserError
from gangline_testkit.toys.plugin import Numbers


class NumbersSource(DataSource):
    """Source of windows of one text; every tenth window is held out for validation.

    Without `path` the text is "100000 100001 ...". Raises UserError if the file is missing or too short.
    """

    def __init__(self, config: Numbers, run: Run, split: Split) -> None:
        self.sequence_length, self.split = run.batch.sequence_length, split
        words = "".join(f"{100_000 + n} " for n in range(config.numbers)).encode()
        if config.path is not None:
            path = Path(str(config.path))
            if not path.is_file():
                raise UserError(f"data.path={path} must be a file.")
            words = path.read_bytes()
        self.tokens = np.frombuffer(words, dtype=np.uint8)
        windows = range((len(words) - 1) // self.sequence_length)
        self.windows = [n for n in windows if (n % 10 == 9) == (split == "validation")]
        if not self.windows:
            raise UserError(
                f"data.path={config.path} is too short for batch.sequence_length: the split {split!r} has no sample."
            )

    def sample(self, i: int) -> Sample:
        start = self.windows[i % len(self.windows)] * self.sequence_length
        return {"tokens": self.tokens[start : start + self.sequence_length + 1].astype(np.int64)}

    def count_samples(self) -> int:
        return len(self.windows)

    def compute_fingerprint(self) -> str:
        digest = hashlib.blake2b(repr((self.sequence_length, self.windows)).encode(), digest_size=8)
        digest.update(self.tokens.tobytes())
        return digest.hexdigest()

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()
