"""Fixtures: small corpora, and token stores made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline_dataloader.prepare.run import prepare
from gangline_dataloader.prepare.settings import Settings


def quiet(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder of sixty texts, a duplicate, an empty file, a binary file and a hidden file."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for number in range(60):
        where = folder / ("deep" if number % 3 else "") / f"file-{number:02d}.txt"
        where.write_text(f"File {number} of the corpus.\r\n" + f"word {number} " * (number * 7))
    (folder / "again.txt").write_text((folder / "file-03.txt").read_text())
    (folder / "empty.txt").write_text("  \n ")
    (folder / "binary.bin").write_bytes(b"\x00\x01\x02" * 100)
    (folder / ".hidden").write_text("hidden")
    return folder


@pytest.fixture
def make_store(tmp_path: Path):
    """Return a function that makes a store: `make_store(folder, validation=0)`; keywords are those of Settings."""
    count = iter(range(100))

    def make(*inputs: Path, workers: int = 1, **settings) -> Path:
        out = tmp_path / f"store-{next(count)}"
        prepare([str(path) for path in inputs], out, Settings(**settings), workers, quiet)
        return out

    return make
