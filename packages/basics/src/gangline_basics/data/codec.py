"""Codecs between text and tokens: bytes, or a Hugging Face tokenizer.json. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gangline.errors import UserError
from gangline_basics.data.named_tokens import read_special_tokens
from gangline_basics.data.pieces import TextPieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Names of end-of-text tokens, because a tokenizer.json does not mark its end-of-text token. The names END_OF_TEXT
# have no other meaning, so they precede the configured eos_token, which may be the end of an answer (<|im_end|>).
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
ENDS = ("</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
OPTIONS = ("data.tokenizer=", "data.separator=")  # names of the options in messages, before the value


class TextCodec(ABC):
    """Codec between text and the tokens of one vocabulary."""

    vocab_size: int
    separator: int | None  # token between files; None: no token
    identity: str  # hash of the tokenizer.json, or "bytes"
    dtype: np.dtype

    @abstractmethod
    def encode_file(self, content: bytes, name: str) -> np.ndarray:
        """Return a file's tokens (n,), without the separator."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """Return tokens as text, without special tokens and tokens outside the vocabulary."""

    def decode_special(self, tokens: list[int]) -> str:
        """Return tokens as text, with special tokens by their names."""
        return self.decode(tokens)

    def encode_special(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """Return (tokens added before the text, such as a BOS; tokens of the text; tokens added after the text)."""
        return [], self.encode(text), []


class ByteCodec(TextCodec):
    """Codec with one token for each byte. Raises UserError for a separator that is not one byte.

    options  names of the options of the tokenizer and the separator, as messages write them before the value
    """

    vocab_size, identity, dtype = 256, "bytes", np.dtype(np.uint8)

    def __init__(self, separator: str | None, options: tuple[str, str] = OPTIONS) -> None:
        separator_bytes = ("\0" if separator is None else separator).encode()
        if len(separator_bytes) != 1:
            raise UserError(
                f"{options[1]}{separator} must be one byte.",
                "Without a tokenizer, each token is one byte.",
                "Set the option to one byte, or remove the option to use byte 0.",
            )
        self.separator = separator_bytes[0]

    def encode_file(self, content: bytes, name: str) -> np.ndarray:
        return np.frombuffer(content, self.dtype)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        text = bytes(token for token in tokens if token < 256).decode(errors="replace")
        return text.replace("\0", "\n")  # byte 0 separates files, and a terminal would not show it


class TokenizerCodec(TextCodec):
    """Codec of a tokenizer.json without truncation, padding, merge dropout and added special tokens.

    pieces   splitter of long texts
    options  as for `ByteCodec`

    Raises UserError for a file that cannot be read, a separator that is not a token, and text that is not UTF-8.
    """

    def __init__(self, path: str, separator: str | None, errors: str, options: tuple[str, str] = OPTIONS) -> None:
        self.option = f"{options[0]}{path}"  # name and value in messages
        content = _read(path, self.option)
        self.tokenizer = _load_tokenizer(self.option, content)
        self.path, self.errors, self.pieces = path, errors, TextPieces(self.tokenizer, content)
        self.vocab_size = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.identity = blake2b(content, digest_size=8).hexdigest()
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)
        names = _list_ends(path) if separator is None else (separator,)
        ids = [id for name in names if (id := self.tokenizer.token_to_id(name)) is not None]
        if separator is not None and not ids:
            raise UserError(f"{options[1]}{separator} is not a token of {path}.")
        self.separator = ids[0] if ids else None

    def encode_file(self, content: bytes, name: str) -> np.ndarray:
        """Return a file's tokens (n,). Raises UserError for invalid UTF-8 if `errors` is strict, or an unknown word."""
        try:
            text = content.decode(errors=self.errors)
        except UnicodeDecodeError as error:
            raise UserError(
                f"data.path: {name} is not UTF-8 at byte {error.start}.",
                "data.encoding_errors=replace replaces invalid bytes; data.tokenizer=null accepts any bytes.",
            ) from error
        with self._name_errors(name):
            encodings = self.tokenizer.encode_batch_fast(self.pieces(text), add_special_tokens=False)
        return np.concatenate([np.empty(0, self.dtype), *(np.asarray(part.ids, self.dtype) for part in encodings)])

    def encode(self, text: str) -> list[int]:
        with self._name_errors(repr(text)):
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(self._drop_unknown(tokens))

    def decode_special(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(self._drop_unknown(tokens), skip_special_tokens=False)

    def encode_special(self, text: str) -> tuple[list[int], list[int], list[int]]:
        with self._name_errors(repr(text)):
            encoding = self.tokenizer.encode(text, add_special_tokens=True)
        ids, own = encoding.ids, [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
        first, stop = (own[0], own[-1] + 1) if own else (len(ids), len(ids))
        return ids[:first], ids[first:stop], ids[stop:]

    def _drop_unknown(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens if token < self.vocab_size]

    @contextmanager
    def _name_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the library raises bare Exception, as for a word that its vocabulary lacks
            raise UserError(f"{self.option} cannot encode {what}.", str(error)) from error


def open_codec(tokenizer: str | None, separator: str | None, errors: str = "replace") -> TextCodec:
    """Return the codec of a tokenizer.json, or of bytes if `tokenizer` is None.

    separator: token between files, None for the vocabulary's own. errors: handling of text that is not UTF-8, as
    for `bytes.decode`. Raises UserError if the codec cannot be loaded.
    """
    return ByteCodec(separator) if tokenizer is None else TokenizerCodec(tokenizer, separator, errors)


def _read(path: str, option: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UserError(
            f"{option} cannot be read.",
            error.strerror or str(error),
            "The option must name a tokenizer.json.",
        ) from error


def _load_tokenizer(option: str, content: bytes) -> Tokenizer:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{option} is not a tokenizer.json.",
            str(error).splitlines()[0],
            "Required: a file that `Tokenizer.save` of the package tokenizers writes.",
        ) from error
    # A tokenizer that has truncated or padded a batch is saved with both on, and would lose text or add padding.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, BPE):
        tokenizer.model.dropout = None  # otherwise a text's tokens are random
    return tokenizer


def _list_ends(path: str) -> tuple[str, ...]:
    """Return the possible names of the end-of-text token, the likeliest first."""
    eos_token = read_special_tokens(Path(path).expanduser().parent).get("eos_token")
    return (*END_OF_TEXT, *([] if eos_token is None else [eos_token]), *ENDS)
