"""Input files of `prepare`: files under the given paths and URLs, in a fixed order, assigned to tasks."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gangline import UserError
from gangline_basics.data import corpus
from gangline_basics.data.compressed import COMPRESSED
from gangline_dataloader.store.external.splits import OTHERS, find_split

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
TABLES = {".json", ".csv", ".tsv", ".arrow"}  # endings of files with rows that are nevertheless read as plain text
BUILT_IN = "Python's standard library"
TEXTS = "plain text files"
NEVER = {"__pycache__", ".git", "node_modules"}


@dataclass(frozen=True)
class Input:
    """One input file. `name` is its path below the command-line argument, with forward slashes."""

    path: str  # path or fsspec URL
    name: str
    source: str  # command-line argument that named the file
    size: int
    modified: float  # modification time in seconds since the epoch; 0 if unknown
    kind: str  # "text": the file is a document; "jsonl", "parquet": each row is a document
    compression: str  # ending of the name that tells the compression; "" for none
    split: str = ""  # "train" or "validation" if the data set has splits; "": the hash of name or text decides


def ignore_line(line: str) -> None:
    """Ignore a message."""


def list_inputs(
    words: Sequence[str], out: str | Path | None = None, say: Callable[[str], None] = ignore_line
) -> list[Input]:
    """List the input files in the order of `words`, sorted by name within each argument.

    words  paths, globs and URLs of the command line; empty: the default corpus of `train`
    out    directory of the store; files below it are left out, because a store may be made inside a folder of texts
    say    reports files that are left out or read as plain text

    Raises UserError for an argument without files, a missing or unreadable path, or a file that is matched twice.
    """
    inputs = [] if words else _list_built_in()
    out_path = None if out is None else os.path.abspath(os.path.expanduser(out))
    for word in words:
        files = _list_remote(word) if "://" in word else _list_local(word)
        if out_path and out_path != os.path.abspath(os.path.expanduser(word)):
            files = [file for file in files if not file.path.startswith(out_path + os.sep)]
        if not files:
            raise UserError(
                f"INPUT {word} matches no files.",
                "Hidden files and files in __pycache__, .git or node_modules are skipped.",
            )
        tables = [file for file in files if file.kind == "text" and _get_suffix(file) in TABLES]
        if tables:
            example = f"{tables[0].name} and {len(tables) - 1} more" if tables[1:] else tables[0].name
            say(
                f"{word}: reading {example} as plain text, one document per file; .jsonl and .parquet are read by rows."
            )
        inputs += select_splits(word, sorted(files, key=lambda file: file.name), say)
    index: dict[str, Input] = {}
    for file in inputs:
        if file.path in index:
            raise UserError(
                f"{file.path} is matched twice: by INPUT {index[file.path].source} and by INPUT {file.source}."
            )
        index[file.path] = file
    return inputs


def select_splits(word: str, files: Sequence[Input], say: Callable[[str], None]) -> list[Input]:
    """Select the train and validation files of a data set with splits, as on the Hugging Face Hub.

    Such a data set has JSONL or Parquet files in a train split and in a validation or test split, by the names of files
    or folders. The validation files are held out; the test split, caches and plain texts are left out. The files of any
    other folder are returned unchanged.
    """
    kinds: dict[str, list[Input]] = {}
    for file in files:
        kinds.setdefault(_find_split(file), []).append(file)
    if "train" not in kinds or not {"validation", "test"} & kinds.keys():
        return list(files)
    omissions = [f"{split} ({len(kinds[split])} files)" for split in ("test", "cache", TEXTS) if split in kinds]
    validation_note = "validation is held out, " if "validation" in kinds else ""
    out = f"{', '.join(omissions) or 'no file'} skipped"
    say(f"{word} is a data set with splits: {validation_note}{out}. To read a skipped file, name it as INPUT.")
    train = "train" if "validation" in kinds else ""
    return [
        replace(file, split="validation" if split == "validation" else train)
        for split in ("train", OTHERS, "validation")
        for file in kinds.get(split, ())
    ]


def _find_split(file: Input) -> str:
    """Find the split of a file by its name and the names of its folders; plain text files get `TEXTS`."""
    if file.kind == "text":
        return TEXTS
    *folders, name = file.name.split("/")
    splits = (find_split(part) for part in (name.partition(".")[0], *reversed(folders)))
    return next((split for split in splits if split != OTHERS), OTHERS)


def _list_built_in() -> list[Input]:
    """List the source files of Python's standard library, which every machine with Python has."""
    return [
        _describe_input(f.path, f.name, BUILT_IN, f.size, os.stat(f.path).st_mtime) for f in corpus.list_corpus(None)
    ]


def _list_local(word: str) -> list[Input]:
    path = os.path.expanduser(word)
    if os.path.isdir(path):
        root, files = path, corpus.walk_files(path, NEVER)
    elif os.path.exists(path):
        corpus.check_regular(path)
        root, files = os.path.dirname(path), [path]
    elif glob.has_magic(path):
        files = corpus.find_files(path)
        root = os.path.commonpath([os.path.dirname(file) for file in files]) if files else ""
    else:
        raise UserError(f"INPUT {word} does not exist.", f"The working directory is {os.getcwd()}.")
    described = []
    for file in files:
        about = os.stat(file)
        name = Path(os.path.relpath(file, root or ".")).as_posix()
        described.append(_describe_input(os.path.abspath(file), name, word, about.st_size, about.st_mtime))
    return described


def _list_remote(word: str) -> list[Input]:
    try:
        import fsspec
    except ImportError as error:
        raise UserError(f"{word} needs fsspec.", "", "pip install 'gangline-dataloader[remote]'") from error
    try:
        store, root = fsspec.core.url_to_fs(word)
        entries = store.find(root, detail=True) if not glob.has_magic(root) else store.glob(root, detail=True)
    except Exception as error:  # each file system raises its own types
        raise UserError(f"{word} cannot be read.", f"{type(error).__name__}: {error}") from error
    described = []
    for path, about in entries.items():
        if about.get("type") == "file":
            name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
            described.append(
                _describe_input(store.unstrip_protocol(path), name, word, int(about.get("size") or 0), 0.0)
            )
    return described


def _get_suffix(file: Input) -> str:
    """Return the ending of a file's name, without the ending of its compression."""
    return os.path.splitext(file.name.lower().removesuffix(file.compression))[1]


def _describe_input(path: str, name: str, source: str, size: int, modified: float) -> Input:
    stem, suffix = os.path.splitext(name.lower())
    compression = suffix if suffix in COMPRESSED else ""
    kind = KINDS.get(os.path.splitext(stem)[1] if compression else suffix, "text")
    return Input(path, name, source, size, modified, kind, compression)


def plan_tasks(files: Sequence[Input], nbytes: int) -> list[list[Input]]:
    """Plan tasks as groups of adjacent files of about `nbytes` per group, which depend only on the files."""
    tasks: list[list[Input]] = []
    size = nbytes
    for file in files:
        if size >= nbytes:
            tasks.append([])
            size = 0
        tasks[-1].append(file)
        size += file.size
    return tasks
