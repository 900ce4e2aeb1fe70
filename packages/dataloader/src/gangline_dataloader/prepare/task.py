"""One task: some files become documents, clean, hashed and tokenised, in two arrays and a note, on disk.

A task whose note is there is done, and is not done again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
import xxhash

from gangline_dataloader.prepare.documents import NotText, documents
from gangline_dataloader.prepare.encode import DocumentEncoder
from gangline_dataloader.prepare.inputs import Input
from gangline_dataloader.prepare.near import PERMUTATIONS, signature
from gangline_dataloader.prepare.rule import Dropped
from gangline_dataloader.prepare.settings import Settings, dtype_for
from gangline_dataloader.store.npy import NpyWriter

# A row for each document that passed: where its tokens end, the hash of its text, whether it is held out, and which
# of the task's sources it is of.
ROW = np.dtype([("end", "<i8"), ("high", "<u8"), ("low", "<u8"), ("held_out", "?"), ("source", "<u4")])


@dataclass
class Count:
    """What became of the documents of one source."""

    files: int = 0
    documents: int = 0
    kept: int = 0
    tokens: int = 0
    nbytes: int = 0  # of text, after cleaning
    dropped: dict[str, int] = field(default_factory=dict)  # why -> how many documents
    replaced: dict[str, int] = field(default_factory=dict)  # what (`prepare.private`) -> how often, before doubles fall

    def add(self, other: Count) -> None:
        for name in ("files", "documents", "kept", "tokens", "nbytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("dropped", "replaced"):
            both = Counter(getattr(self, name)) + Counter(getattr(other, name))
            setattr(self, name, dict(sorted(both.items())))

    def drop(self, why: str, count: int = 1) -> None:
        self.dropped[why] = self.dropped.get(why, 0) + count


@dataclass(frozen=True)
class Finished:
    """A task that is done: its files, and what it counted, by source."""

    tokens: Path
    rows: Path
    signatures: Path  # there where near doubles are dropped
    counts: dict[str, Count]


def paths(folder: Path, number: int) -> tuple[Path, Path, Path, Path]:
    """Tokens, rows, signatures and note of a task."""
    stem = folder / f"task-{number:06d}"
    suffixes = (".npy", ".rows.npy", ".near.npy", ".json")
    tokens, rows, signatures, note = map(stem.with_suffix, suffixes)
    return tokens, rows, signatures, note


def counted_of(tokens: Path) -> Path:
    """Beside a task's tokens, of conversations: which of them are to be learnt."""
    return tokens.with_suffix(".counted.npy")


def finished(folder: Path, number: int) -> Finished | None:
    """What an earlier process made of a task, or None."""
    tokens, rows, signatures, note = paths(folder, number)
    try:
        content = json.loads(note.read_text())
    except (OSError, ValueError):
        return None
    return Finished(tokens, rows, signatures, {source: Count(**count) for source, count in content.items()})


def work(folder: Path, number: int, files: Sequence[Input], settings: Settings, engine: str) -> Finished:
    """Do a task, unless it is done. Raises UserError for an input that cannot be read.

    engine  what encodes, one of settings.ENGINES; the tokens are the same
    """
    if done := finished(folder, number):
        return done
    tokens, rows, signatures, note = paths(folder, number)
    encode = DocumentEncoder(settings, engine)
    counts: dict[str, Count] = {}
    writer, found, alike = NpyWriter(tokens, dtype_for(encode.codec.vocab_size)), [], []
    marks = NpyWriter(counted_of(tokens), "|u1") if settings.chat else None
    for file in files:
        count = counts.setdefault(file.source, Count())
        source = list(counts).index(file.source)
        count.files += 1
        try:
            for document in documents(file, settings.field, settings.chat):
                count.documents += 1
                made = encode(document)
                if isinstance(made, Dropped):
                    count.drop(made.why)
                    continue
                count.add(Count(replaced=made.replaced))
                writer.write(made.tokens)
                if marks is not None and made.counted is not None:
                    marks.write(made.counted)
                digest = xxhash.xxh3_128(made.content).intdigest()
                held = share_of(file, digest) < settings.validation
                found.append((writer.length, digest >> 64, digest & (1 << 64) - 1, held, source))
                if settings.near is not None:
                    alike.append(signature(made.text))
                count.kept, count.tokens, count.nbytes = (
                    count.kept + 1,
                    count.tokens + len(made.tokens),
                    count.nbytes + len(made.content),
                )
        except NotText:
            count.documents += 1
            count.drop("not text")
    writer.close()
    if marks is not None:
        marks.close()
    with rows.open("wb") as file_of_rows:
        np.save(file_of_rows, np.array(found, ROW))
    if settings.near is not None:
        with signatures.open("wb") as file_of_signatures:
            np.save(file_of_signatures, np.array(alike, np.uint32).reshape(-1, PERMUTATIONS))
    waiting = note.with_suffix(".part")
    waiting.write_text(json.dumps({source: asdict(count) for source, count in counts.items()}))
    os.replace(waiting, note)
    return Finished(tokens, rows, signatures, counts)


def share_of(file: Input, digest: int) -> float:
    """A number in [0, 1) that decides whether a document is held out: of its file's name, or where a file has many
    documents of its text; so that it stays on its side when others come or go."""
    if file.kind == "text":
        return int.from_bytes(blake2b(file.name.encode(), digest_size=8).digest(), "little") / 2**64
    return (digest >> 64) / 2**64
