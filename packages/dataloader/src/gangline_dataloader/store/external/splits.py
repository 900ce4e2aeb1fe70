"""Splits (train, validation, test) in folders of Arrow or Parquet files, as in data sets of the Hugging Face Hub.

    DIR/train-00000-of-00002.parquet, DIR/test-00000-of-00001.parquet    or    DIR/train/..., DIR/test/...

A folder of several splits is refused, with the patterns to choose from, so that no run trains on a test split by
mistake.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

from gangline import UserError

ARROW = (".arrow", ".parquet")
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
    "cache": ("cache",),  # files that `Dataset.map` leaves next to its inputs
}
OTHERS = "others"


def is_pattern(path: Path) -> bool:
    """Return whether a path is a glob pattern and not an existing file."""
    return glob.has_magic(str(path)) and not path.exists()


def find_split(name: str) -> str:
    """Find the split in the words of a file's name; `OTHERS` if the name has no split."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, synonyms in SPLITS.items() if any(word in synonyms for word in words)), OTHERS)


def list_table_files(path: Path) -> list[Path]:
    """List the Arrow or Parquet files that a glob pattern matches or that are in a folder.

    Raises UserError if there are no such files, and if a folder has files of several splits or formats.
    """
    if is_pattern(path):
        files = [Path(one) for one in sorted(glob.glob(str(path), recursive=True))]
        if not files or any(one.suffix not in ARROW for one in files):
            wrong = next(
                (f"The pattern matches {one}." for one in files if one.suffix not in ARROW),
                "The pattern matches no file.",
            )
            raise UserError(f"{path} must match Arrow or Parquet files.", wrong)
        return files
    files = sorted(one for one in path.iterdir() if one.suffix in ARROW and not one.name.startswith("."))
    kinds: dict[tuple[str, str], list[str]] = {}
    for one in files:
        kinds.setdefault((find_split(one.stem), one.suffix), []).append(one.name)
    if len(kinds) == 1:
        return files
    if kinds:
        patterns = (_find_pattern(names, kinds) for names in _train_first(kinds))
        options = [f"  data.path={_quote_pattern(path, one)}" for one in patterns if one is not None]
        contents = ", ".join(f"{split} ({len(names)} {suffix[1:]})" for (split, suffix), names in kinds.items())
        raise UserError(
            f"{path} contains files of several splits or formats: {contents}.",
            "A run would train on all these files, including test splits.",
            *(["One of:", *options] if options else ["Move the files of each split into a separate folder."]),
        )
    if below := list_table_folders(path):
        raise UserError(
            f"{path} contains token files only in subfolders.",
            "A run reads the files of one folder, because each folder may be a split.",
            "One of:",
            *(f"  data.path={one}" for one in below),
        )
    raise UserError(f"{path} contains no Arrow or Parquet files.")


def list_table_folders(path: Path) -> list[Path]:
    """List the folders directly in a folder that hold MDS, Arrow or Parquet files, train first."""
    folders = (one for one in sorted(path.iterdir()) if one.is_dir() and not one.name.startswith("."))
    table_folders = [one for one in folders if (one / "index.json").exists() or _find_table_file(one)]
    return sorted(table_folders, key=lambda one: find_split(one.name) != "train")


def _find_table_file(folder: Path) -> str | None:
    with os.scandir(folder) as files:
        return next((one.name for one in files if one.name.endswith(ARROW)), None)


def _train_first(kinds: dict[tuple[str, str], list[str]]) -> list[list[str]]:
    return [kinds[kind] for kind in sorted(kinds, key=lambda kind: (kind[0] != "train", kind))]


def _find_pattern(names: list[str], kinds: dict[tuple[str, str], list[str]]) -> str | None:
    """Find a short glob pattern that matches all `names` and no other name of `kinds`; None if no pattern does."""
    if len(names) == 1:
        return names[0]
    others = [one for group in kinds.values() for one in group if one not in names]
    suffix, word = Path(names[0]).suffix, re.split(r"[^A-Za-z]+", names[0])[0]
    split = find_split(Path(names[0]).stem)
    for tried in (f"{word}-*{suffix}", f"{word}*{suffix}", f"*{split}*{suffix}", f"*{suffix}"):
        if all(fnmatch(one, tried) for one in names) and not any(fnmatch(one, tried) for one in others):
            return tried
    return None


def _quote_pattern(path: Path, pattern: str) -> str:
    return shlex.quote(f"{glob.escape(str(path)) if glob.has_magic(pattern) else path}/{pattern}")
