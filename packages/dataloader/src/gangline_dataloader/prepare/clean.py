"""Cleaning rules, applied to a document before it is tokenised: a rule returns the cleaned text, or why it is dropped.

The default rules normalise Unicode and drop documents without text; quality filters (`prepare.quality`) are opt-in.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from gangline_dataloader.prepare.quality import apply_c4, apply_fineweb, apply_gopher, apply_gopher_repetition
from gangline_dataloader.prepare.rule import Dropped, Rule

# Control characters except tab, LF and CR; byte-order mark, U+FFFE and U+FFFF; halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff\ud800-\udfff]")
_ASCII_CONTROL = bytes(byte for byte in range(128) if _CONTROL.match(chr(byte)))
_BLANKS = re.compile(r"\n{4,}")


def normalise_unicode(text: str) -> str | Dropped:
    """Normalise a text: NFC, line feeds as newlines, no control characters, at most two consecutive blank lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():  # gives the same result as below, ten times as fast
        text = text.encode().translate(None, _ASCII_CONTROL).decode()
    else:
        text = unicodedata.normalize("NFC", _CONTROL.sub("", text))
    return _BLANKS.sub("\n\n\n", text) if "\n\n\n\n" in text else text


def drop_empty(text: str) -> str | Dropped:
    """Drop a text that is empty or only white space."""
    return text if text.strip() else Dropped("empty")


RULES: dict[str, Rule] = {
    "unicode": normalise_unicode,
    "length": drop_empty,
    "gopher": apply_gopher,
    "gopher_repetition": apply_gopher_repetition,
    "c4": apply_c4,
    "fineweb": apply_fineweb,
}
DEFAULT = ("unicode", "length")


def clean_text(text: str, rules: Sequence[str]) -> str | Dropped:
    """Clean a text with every rule, in order; return the cleaned text, or why it is dropped."""
    for name in rules:
        outcome = RULES[name](text)
        if isinstance(outcome, Dropped):
            return outcome
        text = outcome
    return text
