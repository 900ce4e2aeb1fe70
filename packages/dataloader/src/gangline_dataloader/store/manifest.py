"""manifest.json, the index of a token store, written last: a folder with a manifest is complete. Torch-free.

    {"format": "gangline-tokens", "version": 1, "dtype": "<u2", "vocab_size": 32000,
     "tokenizer": {"kind": "tokenizer.json", "identity": "9f...", "file": "tokenizer.json", "end_of_text": 0,
                   "beside": ["chat_template.jinja", "tokenizer_config.json"], "beside_xxh3": ["...", "..."]},
     "shards": {"tokens": [67108800, ...], "documents": [91022, ...], "xxh3": ["...", ...], "ends_xxh3": ["...", ...],
                "pieces_xxh3": ["...", ...]},
     "sources": {...}, "report": {...}, "loss_mask_rule": null, "held_out": true, "validation": "b1...",
     "checksum": "5d..."}

Shard number 3 is shard-00003.npy, with shard-00003.ends.npy next to it. Each list of `shards` has an entry for each
shard. Lists are faster to read than an object for each shard: a store of 10^12 tokens has 15,000 shards and is opened
before every run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from gangline import UserError
from gangline_dataloader.store.durable import replace_json
from gangline_dataloader.store.fields import JsonFields, add_checksum

FILE = "manifest.json"
TEMPLATE = "chat_template.jinja"  # chat template next to the manifest, for stores of conversations
VALIDATION = "validation"  # folder of the validation part, a store of its own
FORMAT, VERSION = "gangline-tokens", 1
DTYPES = ("|u1", "<u2", "<u4")  # as numpy writes them into the header of an .npy file
LARGEST = 1 << 30  # maximum bytes of a manifest: enough for a million shards of a billion tokens


@dataclass(frozen=True)
class ShardEntry:
    """One shard: .npy files of tokens and of exclusive document ends (uint32; the last end equals `tokens`)."""

    tokens: int
    documents: int
    xxh3: str  # XXH3-128 of the complete file of tokens
    ends_xxh3: str  # XXH3-128 of the complete file of document ends
    loss_xxh3: str | None = None  # XXH3-128 of the file with the loss mask; None: no file, all tokens are trained on
    pieces_xxh3: str | None = None  # sampled XXH3-128 of the tokens (`npy.compute_sampled_checksum`); None: old store


@dataclass
class Shards:
    """The shards of a store, by column; each list has an entry for each shard."""

    tokens: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    xxh3: list[str] = field(default_factory=list)
    ends_xxh3: list[str] = field(default_factory=list)
    loss_xxh3: list[str] = field(default_factory=list)  # empty in a store without conversations
    pieces_xxh3: list[str] = field(default_factory=list)  # empty if the store's first shard has none

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> ShardEntry:
        columns = {column.name: getattr(self, column.name) for column in fields(ShardEntry)}
        return ShardEntry(**{name: column[number] for name, column in columns.items() if column})

    def append(self, shard: ShardEntry) -> None:
        count = len(self)
        for column in fields(ShardEntry):
            values, value = getattr(self, column.name), getattr(shard, column.name)
            if value is not None and len(values) == count:
                values.append(value)


def name_tokens_file(number: int) -> str:
    """Return the name of the file with a shard's tokens."""
    return f"shard-{number:05d}.npy"


def name_ends_file(number: int) -> str:
    """Return the name of the file with a shard's document ends, as exclusive token offsets in the shard."""
    return f"shard-{number:05d}.ends.npy"


def name_loss_file(number: int) -> str:
    """Return the name of the file with a shard's loss mask, uint8, in stores of conversations."""
    return f"shard-{number:05d}.loss.npy"


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a store. identity: blake2b of the tokenizer.json, or "bytes"."""

    kind: str  # "bytes" or "tokenizer.json"
    identity: str
    file: str | None = None  # name of the tokenizer.json next to the manifest; None: byte tokens
    end_of_text: int | None = None  # token after each document; None: no token
    beside: list[str] = field(default_factory=list)  # other files next to the manifest, such as the chat template
    beside_xxh3: list[str] = field(default_factory=list)  # XXH3-128 of each file in `beside`


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. The constructor does no checks; `read` checks a file."""

    dtype: str
    vocab_size: int
    tokenizer: Tokenizer
    shards: Shards
    sources: dict[str, Any] = field(default_factory=dict)  # number of files by source
    report: dict[str, Any] = field(default_factory=dict)  # settings, and counts of documents by source
    loss_mask_rule: int | None = None  # `LOSS_MASK_RULE` of the writer; None: not recorded
    held_out: bool = False  # whether a folder `validation` belongs to the store
    validation: str | None = None  # identity of the validation part; None: no validation part, or an older store

    @property
    def tokens(self) -> int:
        return sum(self.shards.tokens)

    @property
    def documents(self) -> int:
        return sum(self.shards.documents)

    def compute_identity(self) -> str:
        """Compute the identity of the data: 32 hex digits that change with any token, document or their order."""
        return self._make_digest("".join(self._format_lines())).hexdigest()

    def take_first_shards(self, count: int) -> Manifest:
        """Return the manifest with only the first `count` shards; sources and report stay unchanged."""
        columns = {column.name: getattr(self.shards, column.name)[:count] for column in fields(self.shards)}
        return replace(self, shards=Shards(**columns))

    def match_prefix(self, identity: str) -> int | None:
        """Return how many of the first shards make a store with that identity; None: no number does."""
        digest = self._make_digest("")
        for number, line in enumerate(self._format_lines()):
            digest.update(line.encode())
            if digest.copy().hexdigest() == identity:
                return number + 1
        return None

    def _make_digest(self, lines: str) -> blake2b:
        deciding = [self.dtype, self.vocab_size, self.tokenizer.identity, self.tokenizer.end_of_text]
        digest = blake2b(json.dumps(deciding).encode(), digest_size=16)
        digest.update(lines.encode())
        return digest

    def _format_lines(self) -> list[str]:
        """Format the values of each shard that decide the identity, one line for each shard."""
        columns = (self.shards.tokens, self.shards.documents, self.shards.xxh3, self.shards.ends_xxh3)
        loss = [f" {one}" for one in self.shards.loss_xxh3] or [""] * len(self.shards)
        return [f"{t} {d} {x} {e}{more}\n" for t, d, x, e, more in zip(*columns, loss, strict=True)]

    def write(self, folder: Path) -> None:
        """Write the manifest atomically, which completes the store."""
        replace_json(folder / FILE, add_checksum({"format": FORMAT, "version": VERSION, **asdict(self)}))


def check_without_validation(manifest: Manifest, name: str) -> None:
    """Raise UserError if a store without a complete validation part should have one. name: path or URL for messages."""
    if manifest.held_out:
        raise UserError(
            f"{name}/{VALIDATION} is missing or incomplete: it has no {FILE}.",
            "The store was prepared with held-out documents, which are stored in that folder.",
            f"Copy the folder {VALIDATION} again, or prepare the store again.",
        )


def explain_stray_validation(name: str) -> UserError:
    """Return the error for a folder `validation` in the store `name`, whose manifest records no held-out documents."""
    return UserError(
        f"{name}/{VALIDATION} does not belong to the store {name}.",
        f"The manifest of {name} records no held-out documents. An interrupted --append left the folder, or the folder "
        "is another store.",
        "After an interrupted --append: type the same `gangline data prepare ... --append` to complete the folder; any "
        "other --append removes the folder. Otherwise: move the folder elsewhere, and name it in validate.sets.",
    )


def read(folder: str | Path, url: str = "") -> Manifest:
    """Read and check the manifest of a store. Raises UserError with file and field.

    The manifest of a validation part has only the shards that its parent store's manifest covers: shards that an
    interrupted --append added are left out.
    url: URL of a store whose manifest was copied to `folder`, for messages.
    """
    folder = Path(folder).expanduser()
    whole = store_around(folder)  # read first, because it is written last
    manifest = _read(folder)
    if whole is None or (whole.held_out and whole.validation is None):
        return manifest
    store = url.rstrip("/").removesuffix(f"/{VALIDATION}") or str(folder.absolute().parent)
    if not whole.held_out:
        raise explain_stray_validation(store)
    if (count := manifest.match_prefix(whole.validation or "")) is None:
        raise UserError(
            f"{store}/{VALIDATION} is not the validation part of the store {store}.",
            f"{store}/{FILE} records other checksums of the validation part.",
            f"Copy the folder {VALIDATION} again, or prepare the store again.",
        )
    return manifest.take_first_shards(count)


def store_around(folder: Path) -> Manifest | None:
    """Return the manifest of the store whose validation part is `folder`; None for any other folder."""
    folder = folder.absolute()
    if folder.name != VALIDATION or not (folder.parent / FILE).exists():
        return None
    try:
        return _read(folder.parent)
    except UserError:  # another format, or a damage that is reported when that store is read
        return None


def _read(folder: Path) -> Manifest:
    path = folder / FILE
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path} is too large for a manifest: {path.stat().st_size} bytes.")
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if not folder.exists():
            create = f"To create a store:  gangline data prepare INPUT --out {folder}"
            raise UserError(f"{folder} does not exist.", create) from error
        raise UserError(
            f"{folder} is not a complete token store: {FILE} is missing.",
            "`gangline data prepare` writes the manifest last, and may have been interrupted.",
            f"gangline data prepare INPUT --out {folder}",
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read.", error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged.", f"The file is not JSON: {error}") from error
    return parse(content, str(path))


def parse(content: Any, path: str) -> Manifest:
    """Parse a manifest from JSON. Raises UserError with the location `path` and the wrong field."""
    document = JsonFields(content, path)
    if document.read_text("format") != FORMAT:
        raise document.explain_damage("format", f"expected {FORMAT!r}")
    if (version := document.read_number("version")) != VERSION:
        raise UserError(
            f"{path} has version {version}, and this gangline-dataloader reads version {VERSION}.",
            "",
            "pip install --upgrade gangline-dataloader",
        )
    if (dtype := document.read_text("dtype")) not in DTYPES:
        raise document.explain_damage("dtype", f"expected one of {', '.join(DTYPES)}")
    vocab_size = document.read_number("vocab_size")
    if vocab_size > np.iinfo(np.dtype(dtype)).max + 1:
        raise document.explain_damage("vocab_size", f"{dtype} cannot hold so many token ids")
    of = document.enter("tokenizer")
    kind, identity = of.read_text("kind"), of.read_text("identity")
    file, end = of.read_optional("file", of.read_name), of.read_optional("end_of_text", of.read_number)
    beside = of.read_optional("beside", of.read_names) or []
    shards = _parse_shards(document.enter("shards"))
    document.check()  # after fields with precise errors, and before fields that older stores without a checksum lack
    tokenizer = Tokenizer(kind, identity, file, end, beside, of.read_checksums("beside_xxh3"))
    if len(tokenizer.beside_xxh3) != len(beside):
        raise of.explain_damage("beside_xxh3", "expected one checksum for each file")
    sources, report = content.get("sources"), content.get("report")
    return Manifest(
        dtype,
        vocab_size,
        tokenizer,
        shards,
        sources if isinstance(sources, dict) else {},
        report if isinstance(report, dict) else {},
        document.read_optional("loss_mask_rule", document.read_number),
        document.read_flag("held_out"),
        document.read_optional("validation", document.read_text),
    )


def _parse_shards(said: JsonFields) -> Shards:
    tokens, documents = said.read_list("tokens", int), said.read_list("documents", int)
    sums, ends = said.read_checksums("xxh3"), said.read_checksums("ends_xxh3")
    if not len(tokens) == len(documents) == len(sums) == len(ends) > 0:
        raise said.explain_damage("tokens", "expected lists of equal length, and not empty")
    if not all(0 < d <= t < 1 << 32 for t, d in zip(tokens, documents, strict=True)):
        raise said.explain_damage(
            "documents", "expected shards with at least one document, no empty documents, and fewer than 2^32 tokens"
        )
    maybe = {key: said.read_optional(key, said.read_checksums) or [] for key in ("loss_xxh3", "pieces_xxh3")}
    for key, checksums in maybe.items():
        if checksums and len(checksums) != len(tokens):
            raise said.explain_damage(key, "expected one checksum for each shard, or an empty list")
    return Shards(tokens, documents, sums, ends, **maybe)
