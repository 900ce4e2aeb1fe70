"""Splitting of long texts into pieces whose concatenated tokens equal the tokens of the complete text. Torch-free.

A tokenizer needs many times the memory of a text, so a long text is encoded piece by piece. A text may be split where

- the pre-tokenizer splits it, if the pre-tokenizer adds no character to the beginning of a text (byte-level BPE)
- a single space begins a word, for tokenizers that replace a space by "▁" (Metaspace, or the normalizer of Llama 2), if
  no token contains "▁" after another character

With any other tokenizer, a text is not split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 1 << 18  # minimum length of a piece in characters
WINDOW = 512  # number of characters before and after a position that are passed to the pre-tokenizer
SHIFTS = 4  # number of overlapping windows; a text is split only where the pre-tokenizer splits it in all windows
SIGN = "▁"
FORMS = (None, "NFC", "NFD", "NFKC", "NFKD")  # normalizers that never merge an ASCII character with its predecessor
# pre-tokenizers whose splits depend only on nearby characters
LOCAL = {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}


class TextPieces:
    """Splitter of texts for one tokenizer. content: bytes of its tokenizer.json."""

    def __init__(self, tokenizer: Tokenizer, content: bytes) -> None:
        about = json.loads(content)
        self._before = tokenizer.pre_tokenizer
        self._form = (about.get("normalizer") or {}).get("type")
        self._normal = str if self._form is None else tokenizer.normalizer.normalize_str
        tokens = [token["content"] for token in about.get("added_tokens") or () if token["content"]]
        self._added = {*tokens, *map(self._normal, tokens)}
        # two-character prefixes: a window without any of these prefixes has no added token
        self._starts = {token[:2] for token in self._added}
        self._longest = max(map(len, self._added), default=0)
        self._words, self._spaces, self._dropped = _splits_at_words(about), _splits_at_spaces(about), 0
        if _puts_sign_first(about):
            # the "▁" that the tokenizer prepends to each piece replaces the dropped space
            self._spaces, self._dropped = True, 1

    def __call__(self, text: str) -> list[str]:
        """Return the pieces of a text, each of at least `PIECE` characters except the last."""
        pieces, start = [], 0
        while (place := self._find_border(text, start + PIECE)) is not None:
            pieces.append(text[start:place])
            start = place + self._dropped
        return [*pieces, text[start:]] if text else []

    def _find_border(self, text: str, first: int) -> int | None:
        """Return the first position from `first` on where the text may be split, or None."""
        if not (self._words or self._spaces):
            return None
        for start in range(first, len(text) - 2 * WINDOW, WINDOW):
            reach = WINDOW + self._longest  # an added token may strip white space around it
            near = text[max(0, start - reach) : start + WINDOW + reach]
            near += self._normal(near)  # an added token may match before or after normalization
            if any(one in near for one in self._starts) and any(token in near for token in self._added):
                continue
            places = self._split_words(text, start) if self._words else self._split_spaces(text, start)
            if (place := next(places, None)) is not None:
                return place
        return None

    def _split_words(self, text: str, start: int) -> Iterator[int]:
        borders: set[int] | None = None
        for shift in range(SHIFTS):
            here = self._find_word_borders(text, start, start - WINDOW + shift, start + 2 * WINDOW + shift)
            borders = here if borders is None else borders & here
        yield from sorted(borders or ())

    def _find_word_borders(self, text: str, start: int, begin: int, end: int) -> set[int]:
        """Return the positions from `start` on where the pre-tokenizer splits the normalized text[begin:end]."""
        normal = self._normal(text[begin:end])
        firsts = {first for _, (first, _) in self._before.pre_tokenize_str(normal)}
        borders, last, at = set(), begin, 0
        for place in range(start, start + WINDOW):
            # an ASCII character is normalized independently of the text before it
            if self._form is None or text[place].isascii():
                at += len(self._normal(text[last:place]))
                last = place
                # A piece must not end in white space: the look-ahead of patterns would split it differently.
                if at in firsts and not normal[at - 1].isspace():
                    borders.add(place)
        return borders

    def _split_spaces(self, text: str, start: int) -> Iterator[int]:
        place = text.find(" ", start, start + WINDOW)
        while place >= 0:
            if not any(one.isspace() or one == SIGN for one in (text[place - 1], text[place + 1])):
                yield place
            place = text.find(" ", place + 1, start + WINDOW)


def _list_steps(part: dict[str, Any] | None, kinds: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence of normalizers or pre-tokenizers, or the single step."""
    if part is None:
        return []
    return list(part[kinds]) if part["type"] == "Sequence" else [part]


def _splits_at_words(about: dict[str, Any]) -> bool:
    steps = _list_steps(about.get("pre_tokenizer"), "pretokenizers")
    plain = (about.get("normalizer") or {}).get("type") in FORMS
    local = (one["type"] in LOCAL or (one["type"] == "ByteLevel" and not one.get("add_prefix_space")) for one in steps)
    return plain and bool(steps) and all(local)


def _splits_at_spaces(about: dict[str, Any]) -> bool:
    before = about.get("pre_tokenizer") or {}
    if (about.get("normalizer") or {}).get("type") not in FORMS or before.get("type") != "Metaspace":
        return False
    return before.get("replacement") == SIGN and (before.get("split", True) or _begins_words(about))


def _puts_sign_first(about: dict[str, Any]) -> bool:
    steps = _list_steps(about.get("normalizer"), "normalizers")
    sign_steps = [
        {"type": "Prepend", "prepend": SIGN},
        {"type": "Replace", "pattern": {"String": " "}, "content": SIGN},
    ]
    return about.get("pre_tokenizer") is None and steps == sign_steps and _begins_words(about)


def _begins_words(about: dict[str, Any]) -> bool:
    """Return whether every token contains "▁" only at its beginning."""
    vocabulary = about["model"].get("vocab") or ()
    words = vocabulary if isinstance(vocabulary, dict) else [word for word, _ in vocabulary]
    return not any(SIGN in word.lstrip(SIGN) for word in words)
