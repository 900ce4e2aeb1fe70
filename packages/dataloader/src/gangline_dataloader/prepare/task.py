"""One task of `prepare`: turns some files into documents, cleaned, tokenised and hashed, in two arrays and a JSON note.

A task with a note on disk is finished and is not repeated. Documents are compared by a hash of their tokens and loss
mask, so that the documents of a store can be hashed again when more are appended.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
import xxhash

from gangline_dataloader.prepare.documents import NotText, read_documents
from gangline_dataloader.prepare.encode import DocumentEncoder
from gangline_dataloader.prepare.inputs import Input
from gangline_dataloader.prepare.near import PERMUTATIONS, compute_signature
from gangline_dataloader.prepare.rule import Dropped
from gangline_dataloader.prepare.settings import Settings, choose_dtype
from gangline_dataloader.store.durable import replace_json
from gangline_dataloader.store.npy import NpyWriter, save_array

# A row for each document that passed: end of its tokens, hash of its tokens and loss mask (high and low 64 bits),
# whether the document is held out, index of its source in the task, and bytes of its text.
ROW = np.dtype(
    [("end", "<i8"), ("high", "<u8"), ("low", "<u8"), ("held_out", "?"), ("source", "<u4"), ("nbytes", "<u8")]
)
_LOW = (1 << 64) - 1


@dataclass
class Count:
    """Counts of the documents of one source: read, kept, dropped."""

    files: int = 0
    documents: int = 0
    kept: int = 0
    tokens: int = 0
    nbytes: int = 0  # bytes of kept text, after cleaning
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> number of documents
    replaced: dict[str, int] = field(default_factory=dict)  # kind of replaced text -> replacements before deduplication

    def add(self, other: Count) -> None:
        for name in ("files", "documents", "kept", "tokens", "nbytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("dropped", "replaced"):
            both = Counter(getattr(self, name)) + Counter(getattr(other, name))
            setattr(self, name, dict(sorted(both.items())))

    def replace(self, found: Mapping[str, int]) -> None:
        for what, number in found.items():
            self.replaced[what] = self.replaced.get(what, 0) + number

    def drop(self, why: str, count: int = 1) -> None:
        self.dropped[why] = self.dropped.get(why, 0) + count


@dataclass(frozen=True)
class Finished:
    """A finished task: its files, and its counts by source."""

    tokens: Path
    rows: Path
    signatures: Path  # written only with near-deduplication
    counts: dict[str, Count]


def locate_task_files(folder: Path, number: int) -> tuple[Path, Path, Path, Path]:
    """Locate the files of a task: tokens, rows, signatures and note."""
    stem = folder / f"task-{number:06d}"
    suffixes = (".npy", ".rows.npy", ".near.npy", ".json")
    tokens, rows, signatures, note = map(stem.with_suffix, suffixes)
    return tokens, rows, signatures, note


def locate_counted(tokens: Path) -> Path:
    """Locate the loss mask of a task's tokens, which exists for conversations."""
    return tokens.with_suffix(".counted.npy")


def load_finished(folder: Path, number: int) -> Finished | None:
    """Load the result of a finished task; None if it is not finished."""
    tokens, rows, signatures, note = locate_task_files(folder, number)
    try:
        content = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Finished(tokens, rows, signatures, {source: Count(**count) for source, count in content.items()})


def make_tag() -> str:
    """Make a tag for names of temporary files that is unique over all processes and machines."""
    return f".{os.getpid()}-{secrets.token_hex(4)}"


def work(folder: Path, number: int, files: Sequence[Input], settings: Settings, engine: str) -> None:
    """Run a task unless it is finished. Raises UserError for an input that cannot be read.

    engine  tokeniser library, one of settings.ENGINES, without effect on the tokens
    """
    if load_finished(folder, number):
        return
    tag = make_tag()
    try:
        _work(folder, number, tag, files, settings, engine)
    except BaseException:
        for path in folder.glob(f".*{tag}.part"):
            path.unlink(missing_ok=True)
        raise


def _work(folder: Path, number: int, tag: str, files: Sequence[Input], settings: Settings, engine: str) -> None:
    tokens, _, _, note = locate_task_files(folder, number)
    encode = DocumentEncoder(settings, engine)
    counts: dict[str, Count] = {}
    writer = NpyWriter(tokens, choose_dtype(encode.codec.vocab_size), tag)
    marks = NpyWriter(locate_counted(tokens), "|u1", tag) if settings.chat else None
    rows, alike = [], []
    for file in files:
        count = counts.setdefault(file.source, Count())
        source, side = list(counts).index(file.source), hash_file_name(file)
        count.files += 1
        try:
            for document in read_documents(file, settings.field, settings.chat):
                count.documents += 1
                outcome = encode(document)
                if isinstance(outcome, Dropped):
                    count.drop(outcome.why)
                    continue
                count.replace(outcome.replaced)
                token_ids = np.ascontiguousarray(outcome.tokens, writer.dtype)
                writer.write(token_ids)
                if marks is not None and outcome.counted is not None:
                    marks.write(outcome.counted)
                digest = compute_digest(token_ids, outcome.counted)
                held = file.split == "validation"
                if not file.split:
                    share = xxhash.xxh3_64_intdigest(outcome.content) if side is None else side
                    held = share < settings.validation * 2**64
                rows.append((writer.length, digest >> 64, digest & _LOW, held, source, len(outcome.content)))
                if settings.near is not None:
                    alike.append(compute_signature(outcome.text))
                count.kept += 1
                count.tokens += len(token_ids)
                count.nbytes += len(outcome.content)
        except NotText:
            count.documents += 1
            count.drop("not text")
    writer.close()
    if marks is not None:
        marks.close()
    save(folder, number, tag, rows, alike if settings.near is not None else None)
    replace_json(note, {source: vars(count) for source, count in counts.items()}, tag)


def save(folder: Path, number: int, tag: str, found: list[tuple], alike: list[np.ndarray] | None) -> None:
    """Save the rows of a task and, with near-deduplication, its signatures."""
    _, rows, signatures, _ = locate_task_files(folder, number)
    save_array(rows, np.array(found, ROW), tag)
    if alike is not None:
        save_array(signatures, np.array(alike, np.uint32).reshape(-1, PERMUTATIONS), tag)


def compute_digest(tokens: np.ndarray, counted: np.ndarray | None) -> int:
    """Return the hash for exact deduplication: of a document's tokens and, for a conversation, of its loss mask.

    counted  (n,) bool or uint8 loss mask of the tokens (n,); None: all tokens are trained on
    """
    digest = xxhash.xxh3_128(tokens.data)
    if counted is not None:
        digest.update(np.ascontiguousarray(counted, np.uint8).data)
    return digest.intdigest()


def hash_file_name(file: Input) -> int | None:
    """Hash a text file's name to [0, 2^64), which decides whether the file is held out; None: files with rows.

    For a row, the hash of its text decides. So a document keeps its split when other inputs are added or removed.
    """
    if file.kind == "text":
        return int.from_bytes(blake2b(file.name.encode(), digest_size=8).digest(), "little")
    return None
