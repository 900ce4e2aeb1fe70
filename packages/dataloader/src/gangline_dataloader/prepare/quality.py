"""Quality filters for English web text, chosen by name; the thresholds are from the papers.

gopher             Rae et al., arXiv 2112.11446, table A1, quality
gopher_repetition  table A1 of the Gopher paper, repetition
c4                 Raffel et al., arXiv 1910.10683, section 2.2, without its list of bad words
fineweb            Penedo et al., arXiv 2406.17557, section 3.6
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from gangline_dataloader.prepare.rule import Dropped

_WORD = re.compile(r"\S+")
_STOP = {"the", "be", "to", "of", "and", "that", "have", "with"}
_SENTENCE = re.compile(r"[.!?][\"'”’)]*(?=\s|$)")
_ENDS = (".", "!", "?", '"', "”")

# n -> maximum fraction of characters in the most frequent n-gram (_TOP), or in all repeated n-grams (_REPEATED).
_TOP = {2: 0.20, 3: 0.18, 4: 0.16}
_REPEATED = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


def _split_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def apply_gopher(text: str) -> str | Dropped:
    """Keep English prose by Gopher's quality rules; else return the rule that drops the text."""
    words, lines = _WORD.findall(text), _split_lines(text)
    if not 50 <= len(words) <= 100_000:
        return Dropped("gopher: number of words")
    if not 3 <= sum(map(len, words)) / len(words) <= 10:
        return Dropped("gopher: length of words")
    if (text.count("#") + text.count("...") + text.count("…")) / len(words) > 0.1:
        return Dropped("gopher: symbols")
    if sum(line.startswith(("•", "-", "*")) for line in lines) / len(lines) > 0.9:
        return Dropped("gopher: bullets")
    if sum(line.endswith(("...", "…")) for line in lines) / len(lines) > 0.3:
        return Dropped("gopher: ellipses")
    if sum(any(letter.isalpha() for letter in word) for word in words) / len(words) < 0.8:
        return Dropped("gopher: words without letters")
    if len(_STOP & {word.lower() for word in words}) < 2:
        return Dropped("gopher: stop words")
    return text


def apply_gopher_repetition(text: str) -> str | Dropped:
    """Drop a text with too many repeated lines, paragraphs or n-grams of words."""
    for what, parts in (
        ("lines", _split_lines(text)),
        ("paragraphs", [p.strip() for p in text.split("\n\n") if p.strip()]),
    ):
        number, characters = _count_duplicates(parts)
        if parts and number / len(parts) > 0.30:
            return Dropped(f"gopher: repeated {what}")
        if characters / max(1, len(text)) > 0.20:
            return Dropped(f"gopher: characters of repeated {what}")
    words = _WORD.findall(text.lower())
    whole = max(1, sum(map(len, words)))
    for n, most in _TOP.items():
        if _count_top_ngram(words, n) / whole > most:
            return Dropped(f"gopher: most frequent {n}-gram")
    for n, most in _REPEATED.items():
        if _count_repeated(words, n) / whole > most:
            return Dropped(f"gopher: repeated {n}-grams")
    return text


def apply_c4(text: str) -> str | Dropped:
    """Keep the lines that are sentences: five words or more, final punctuation, no "javascript"; or drop the text.

    A text is dropped for a curly bracket, "lorem ipsum", or fewer than three sentences in its kept lines.
    """
    if "{" in text:
        return Dropped("c4: curly bracket")
    if "lorem ipsum" in text.lower():
        return Dropped("c4: lorem ipsum")
    lines = [
        line
        for line in _split_lines(text)
        if line.endswith(_ENDS)
        and not line.endswith("...")
        and len(_WORD.findall(line)) >= 5
        and "javascript" not in line.lower()
    ]
    if sum(len(_SENTENCE.findall(line)) for line in lines) < 3:
        return Dropped("c4: number of sentences")
    return "\n".join(lines)


def apply_fineweb(text: str) -> str | Dropped:
    """Drop pages that are lists: few lines end like sentences, most lines are short, or lines are repeated."""
    lines = _split_lines(text)
    if not lines or sum(line.endswith(_ENDS) for line in lines) / len(lines) <= 0.12:
        return Dropped("fineweb: ends of lines")
    if sum(len(line) < 30 for line in lines) / len(lines) >= 0.67:
        return Dropped("fineweb: short lines")
    if _count_duplicates(lines)[1] / sum(map(len, lines)) >= 0.1:
        return Dropped("fineweb: characters of repeated lines")
    return text


def _count_duplicates(parts: Sequence[str]) -> tuple[int, int]:
    """Count the lines or paragraphs that repeat an earlier one, and their characters."""
    again = Counter(parts)
    return len(parts) - len(again), sum((count - 1) * len(part) for part, count in again.items())


def _count_top_ngram(words: Sequence[str], n: int) -> int:
    """Count the characters of the repeated n-gram that takes up most characters; 0 without repetition."""
    grams = Counter(zip(*(words[i:] for i in range(n)), strict=False))
    return max((count * sum(map(len, gram)) for gram, count in grams.items() if count > 1), default=0)


def _count_repeated(words: Sequence[str], n: int) -> int:
    """Count the characters of words in n-grams that repeat an earlier n-gram, each word once."""
    grams: set[tuple[str, ...]] = set()
    characters, covered = 0, 0  # covered: end of the words counted so far
    for start in range(len(words) - n + 1):
        gram = tuple(words[start : start + n])
        if gram in grams:
            characters += sum(map(len, words[max(start, covered) : start + n]))
            covered = start + n
        grams.add(gram)
    return characters
