"""Rules that a document passes before it becomes tokens: each mends it or says why it is dropped.

The defaults mend what no one wants to learn and drop what has no text in it; rules that judge quality are asked for
by name. The thresholds of `gopher` are those of Rae et al., arXiv 2112.11446, table A1.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Rule = Callable[[str], "str | Dropped"]


@dataclass(frozen=True)
class Dropped:
    """Why a document is not kept, as a word for the report."""

    why: str


# Control characters, but for tab and newline; a byte-order mark; halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff\ud800-\udfff]")
_BLANKS = re.compile(r"\n{4,}")
_WORD = re.compile(r"\S+")
_STOP = {"the", "be", "to", "of", "and", "that", "have", "with"}


def unicode(text: str) -> str | Dropped:
    """Composed characters (NFC), newlines as newlines, no control characters, no towers of blank lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROL.sub("", unicodedata.normalize("NFC", text))
    return _BLANKS.sub("\n\n\n", text)


def length(text: str) -> str | Dropped:
    """Something has to be there."""
    return text if text.strip() else Dropped("empty")


def gopher(text: str) -> str | Dropped:
    """English prose as Gopher's authors tell it from the rest of the web."""
    words = _WORD.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    if not 50 <= len(words) <= 100_000:
        return Dropped("gopher: number of words")
    if not 3 <= sum(map(len, words)) / len(words) <= 10:
        return Dropped("gopher: length of words")
    if (text.count("#") + text.count("...") + text.count("…")) / len(words) > 0.1:
        return Dropped("gopher: symbols")
    if sum(line.lstrip().startswith(("•", "-", "*")) for line in lines) / len(lines) > 0.9:
        return Dropped("gopher: bullets")
    if sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines) > 0.3:
        return Dropped("gopher: ellipses")
    if sum(any(letter.isalpha() for letter in word) for word in words) / len(words) < 0.8:
        return Dropped("gopher: words without letters")
    if len(_STOP & {word.lower() for word in words}) < 2:
        return Dropped("gopher: stop words")
    return text


RULES: dict[str, Rule] = {"unicode": unicode, "length": length, "gopher": gopher}
DEFAULT = ("unicode", "length")


def cleaned(text: str, rules: Sequence[str]) -> str | Dropped:
    """The text after every rule, in order, or why one of them drops it."""
    for name in rules:
        found = RULES[name](text)
        if isinstance(found, Dropped):
            return found
        text = found
    return text
