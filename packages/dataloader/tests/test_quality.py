"""Quality rules of `--clean`: a text that each rule drops, and prose that all rules accept."""

from __future__ import annotations

import pytest

from gangline_dataloader.prepare.clean import RULES, clean_text
from gangline_dataloader.prepare.rule import Dropped

SUBJECTS = [
    "carpenter",
    "river",
    "teacher",
    "garden",
    "engine",
    "island",
    "winter",
    "orchard",
    "market",
    "sailor",
    "library",
    "mountain",
]
VERBS = [
    "measured",
    "crossed",
    "remembered",
    "painted",
    "repaired",
    "described",
    "followed",
    "gathered",
    "watched",
    "counted",
    "opened",
    "left",
]
OBJECTS = [
    "timber",
    "stones",
    "lessons",
    "petals",
    "pistons",
    "harbour",
    "snowfall",
    "branches",
    "stalls",
    "ropes",
    "pages",
    "valleys",
]
PROSE = "\n".join(
    f"The {subject} {verb} the {what} and the people of {subject[::-1]} have talked about {verb[:4]}ing "
    f"with {what} ever since."
    for subject, verb, what in zip(SUBJECTS, VERBS, OBJECTS, strict=True)
)
ASKED = ("gopher", "gopher_repetition", "c4", "fineweb")


@pytest.mark.parametrize("rule", ASKED)
def test_every_quality_rule_keeps_prose(rule: str) -> None:
    assert clean_text(PROSE, [rule]) == PROSE


WORDS = " ".join([*SUBJECTS, *VERBS, *OBJECTS])
PARAGRAPHS = ["\n".join(words) for words in (SUBJECTS, VERBS)]
DROPPED = {
    "gopher: number of words": ("gopher", "The cat and the dog."),
    "gopher: length of words": ("gopher", "a b " * 60),
    "gopher: symbols": ("gopher", "the words and #tags " * 40),
    "gopher: bullets": ("gopher", "- the milk and the bread of today\n" * 30),
    "gopher: ellipses": ("gopher", "the milk and the bread of today...\n" * 10 + PROSE.replace("\n", " ")),
    "gopher: words without letters": ("gopher", "the 1234 and 5678 have 910 " * 20),
    "gopher: stop words": ("gopher", "carpenter river teacher garden engine " * 20),
    "gopher: repeated lines": ("gopher_repetition", "A line of words.\nA line of words.\nAnother line.\n" * 9),
    "gopher: characters of repeated lines": (
        "gopher_repetition",
        "\n".join([PROSE, *[PROSE.splitlines()[0] * 2] * 3]),
    ),
    "gopher: repeated paragraphs": ("gopher_repetition", "\n\n".join([*PARAGRAPHS, "one", "one", "one"])),
    "gopher: most frequent 2-gram": ("gopher_repetition", " ".join(f"alpha beta {word}" for word in SUBJECTS)),
    "gopher: repeated 5-grams": ("gopher_repetition", f"{WORDS} {WORDS}"),
    "c4: curly bracket": ("c4", PROSE + "\nif (x) { return; }"),
    "c4: lorem ipsum": ("c4", PROSE + "\nLorem ipsum dolor."),
    "c4: number of sentences": ("c4", "Menu\nHome\nThis one line is a sentence of many words.\nContact"),
    "fineweb: ends of lines": ("fineweb", "a line that has no end whatsoever here\n" * 3),
    "fineweb: short lines": ("fineweb", "\n".join([*(f"Short {word}." for word in SUBJECTS), "x" * 40])),
    "fineweb: characters of repeated lines": ("fineweb", PROSE + "\n" + "\n".join(PROSE.splitlines()[:3])),
}


@pytest.mark.parametrize("why", DROPPED)
def test_dropped_text_names_the_rule(why: str) -> None:
    rule, text = DROPPED[why]
    assert clean_text(text, [rule]) == Dropped(why)


def test_c4_keeps_the_lines_that_are_sentences() -> None:
    noisy = f"Home | About\n{PROSE}\nPlease enable JavaScript to read all of this page.\nRead more...\nToo short."
    assert clean_text(noisy, ["c4"]) == PROSE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("text", ["", " \n\t", "x", "\n\n", "word", "。" * 100, "a\u2028b"])
def test_rules_handle_degenerate_texts(rule: str, text: str) -> None:
    assert isinstance(RULES[rule](text), str | Dropped)
