"""Settings that determine the bytes of a prepared store; other options, such as --workers, must not affect them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import xxhash

from gangline import UserError
from gangline_basics.data.chat import ChatTemplate, read_template
from gangline_basics.data.chat_tokens import LOSS_MASK_RULE
from gangline_basics.data.codec import ByteCodec, TextCodec, TokenizerCodec
from gangline_basics.data.tokenizer_files import find_file
from gangline_dataloader.prepare import language, near
from gangline_dataloader.prepare.clean import DEFAULT, RULES
from gangline_dataloader.prepare.fast_bpe import build_fast_bpe
from gangline_dataloader.prepare.inputs import Input
from gangline_dataloader.prepare.private import KINDS
from gangline_dataloader.store.durable import replace_bytes
from gangline_dataloader.store.manifest import TEMPLATE, Tokenizer
from gangline_dataloader.store.write import SHARD_TOKENS

BYTES = "bytes"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", TEMPLATE)  # files next to a tokenizer.json
# Version of the rules of --clean, --language and --replace, incremented when the result of a rule changes. Plans and
# stores record it; with another version, a killed call restarts from scratch and --append is refused.
# 1: not recorded. 2: Unicode characters are composed (NFC) after control characters are removed.
RULES_VERSION = 2
CODEC_OPTIONS = ("--tokenizer ", "--end-of-text ")  # names of the codec's options in messages
TIKTOKEN, TOKENIZERS = ENGINES = ("tiktoken", "tokenizers")


@dataclass(frozen=True)
class Settings:
    """The options of `gangline data prepare` that determine the bytes of the store."""

    tokenizer: str = BYTES  # "bytes" or the path of a tokenizer.json
    end_of_text: str | None = None  # token after each document; None: the tokenizer's own, byte 0 for bytes
    field: str = "text"  # field of JSONL, column of Parquet
    begin_of_text: str | None = None  # token before each document; None: no token
    chat: bool = False  # whether the field holds messages; only the assistant's messages are trained on
    chat_template: str | None = None  # chat template file; None: the template next to the tokenizer
    clean: tuple[str, ...] = DEFAULT
    languages: tuple[str, ...] = ()  # ISO 639 codes of the languages to keep (`prepare.language`); (): all languages
    confidence: float = 0.5  # minimum confidence of the language classifier, in [0, 1]
    private: tuple[str, ...] = ()  # kinds of personal data to replace (`prepare.private`)
    exact: bool = True  # exact deduplication
    near: float | None = None  # near-deduplication threshold: minimum similarity in (0, 1] (`prepare.near`); None: off
    validation: float = 0.02  # fraction of the documents to hold out
    shard_tokens: int = SHARD_TOKENS
    task_bytes: int = 64 << 20

    @classmethod
    def from_record(cls, known: dict[str, Any]) -> Settings:
        """Return the settings recorded as JSON; unknown names are ignored."""
        values: dict[str, Any] = {}
        for item in fields(cls):
            if item.name in known:
                value = known[item.name]
                values[item.name] = tuple(value) if isinstance(value, list) else value
        if not values.get("end_of_text"):  # older stores may record '', which meant byte 0
            values.pop("end_of_text", None)
        return cls(**values)

    @property
    def filters(self) -> bool:
        """Return whether a rule that RULES_VERSION covers may change or drop documents."""
        return bool(self.clean or self.languages or self.private)

    def open_codec(self, engine: str = TOKENIZERS) -> TextCodec:
        """Open the codec from text to tokens; all ENGINES give equal tokens. Raises UserError for a bad tokenizer."""
        if self.tokenizer == BYTES:
            return ByteCodec(self.end_of_text, CODEC_OPTIONS)
        path = Path(self.tokenizer).expanduser()
        about = path.stat() if path.exists() else None
        return _open_tokenizer_codec(
            self.tokenizer, self.end_of_text, engine, about and (about.st_mtime_ns, about.st_size)
        )

    def load_template(self) -> ChatTemplate | None:
        """Load the chat template of conversations; None without --chat. Raises UserError if there is no template."""
        if not self.chat:
            return None
        return read_template(None if self.tokenizer == BYTES else self.tokenizer, self.chat_template)

    def find_begin_token(self) -> int:
        """Find the id of the token before each document. Raises UserError if the tokenizer has no such token."""
        word, codec = self.begin_of_text or "", self.open_codec()
        token = codec.tokenizer.token_to_id(word) if isinstance(codec, TokenizerCodec) else None
        if not isinstance(codec, TokenizerCodec) and len(word.encode()) == 1:
            token = word.encode()[0]
        if token is None:
            raise UserError(f"--begin-of-text {word} is not a token of --tokenizer {self.tokenizer}.")
        return int(token)

    def check(self) -> None:
        """Raise UserError for invalid values and for mutually exclusive options."""
        if not self.field:
            raise UserError(
                "--field is empty: it must name the field that holds the text of each JSONL or Parquet row."
            )
        self.open_codec()
        self.load_template()
        if self.begin_of_text is not None:
            self.find_begin_token()
            if self.chat:
                raise UserError(
                    "--begin-of-text is not supported with --chat.",
                    "The chat template writes the start of each conversation.",
                    "Remove --begin-of-text.",
                )
        if self.chat_template is not None and not self.chat:
            raise UserError("--chat-template requires --chat.")
        unknown = [rule for rule in self.clean if rule not in RULES]
        if unknown:
            raise UserError(
                f"--clean {','.join(self.clean)}: unknown rule {unknown[0]}.", f"Rules: {', '.join(RULES)}, or none."
            )
        if unknown := [kind for kind in self.private if kind not in KINDS]:
            raise UserError(
                f"--replace {','.join(self.private)}: unknown kind {unknown[0]}.",
                f"Kinds: {', '.join(KINDS)}, or none.",
            )
        if self.languages:
            language.check(self.languages)
        if not 0 <= self.confidence <= 1:
            raise UserError(
                f"--confidence {self.confidence} must be between 0 and 1.",
                "--confidence is the minimum confidence of the language classifier.",
            )
        if self.near is not None and not 0 < self.near <= 1:
            raise UserError(
                f"--near-duplicates {self.near} must be greater than 0 and at most 1.",
                "--near-duplicates is the minimum Jaccard similarity of two near-duplicates, typically 0.8.",
            )
        if self.near is not None and not self.exact:
            raise UserError(
                "--keep-duplicates is not supported with --near-duplicates.",
                "Near-deduplication also drops exact duplicates.",
                "Remove one of the two options.",
            )
        if self.near is not None:
            near.check()
        if not 0 <= self.validation < 1:
            raise UserError(
                f"--validation {self.validation} must be at least 0 and less than 1.",
                "--validation is the fraction of the documents that is held out.",
            )

    def compute_identity(self, files: Sequence[Input]) -> str:
        """Compute a hash of everything that determines the store; work of a call with another hash must not be reused.

        The hash covers the names of files, which determine the held-out documents, and their sources, for the report.
        """
        return self._hash([(file.path, file.size, file.modified, file.split, file.name, file.source) for file in files])

    def compute_older_identity(self, files: Sequence[Input]) -> str:
        """Return the identity hash of stores made before file names and sources were hashed."""
        return self._hash([(file.path, file.size, file.modified, file.split) for file in files])

    def _hash(self, listed: Sequence[tuple]) -> str:
        decided = {
            **asdict(self),
            "tokenizer": self.open_codec().identity,
            "end": self.open_codec().separator,
        }
        if self.near is not None:
            decided["near_by"] = near.check()
        template = self.load_template()
        decided["chat_template"] = template and [template.source, sorted(template.special.items()), LOSS_MASK_RULE]
        return blake2b(json.dumps([decided, listed]).encode(), digest_size=16).hexdigest()


@cache
def _open_tokenizer_codec(
    tokenizer: str, end_of_text: str | None, engine: str, version: tuple[int, int] | None
) -> TextCodec:
    codec = TokenizerCodec(tokenizer, end_of_text, "replace", CODEC_OPTIONS)
    return (build_fast_bpe(codec) if engine == TIKTOKEN else None) or codec


def choose_dtype(vocab_size: int) -> str:
    """Choose the narrowest stored dtype that holds every token."""
    return "|u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4"


def copy_tokenizer(settings: Settings, folder: Path) -> Tokenizer:
    """Copy the tokenizer, its special tokens and its chat template next to the manifest; return the manifest's entry.

    The copy makes the store self-contained. The template of conversations is the template that rendered them.
    """
    codec, template = settings.open_codec(), settings.load_template()
    kind, file = (BYTES, None) if settings.tokenizer == BYTES else ("tokenizer.json", "tokenizer.json")
    contents: dict[str, bytes] = {}
    if file is not None:
        path = Path(settings.tokenizer).expanduser()
        files = {name: find_file(path.parent, name) for name in BESIDE}
        contents = {name: file.read_bytes() for name, file in files.items() if file is not None}
        replace_bytes(folder / file, path.read_bytes())
    if template is not None:
        contents[TEMPLATE] = template.source.encode()
    for name, content in contents.items():
        replace_bytes(folder / name, content)
    sums = [xxhash.xxh3_128_hexdigest(contents[name]) for name in sorted(contents)]
    return Tokenizer(kind, codec.identity, file, codec.separator, sorted(contents), sums)
