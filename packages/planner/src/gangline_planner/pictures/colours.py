"""One colour for each kind of time, of memory and of action, and one letter for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from gangline_basics.figure import PALETTE

# Okabe and Ito's, then darker and paler ones between which nobody has to tell who sees only some of these
COLOURS = (*PALETTE, "#8c510a", "#b8e186", "#762a83", "#999999", "#1a1a1a")
ACTIONS = dict(zip(("F", "B", "I", "W"), PALETTE, strict=False))
ACTION_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def get_colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def choose_letters(kinds: Iterable[str]) -> dict[str, str]:
    """Kind -> a letter of it that no earlier one has; capitals where all are taken."""
    letters: dict[str, str] = {}
    for kind in kinds:
        free = (letter for letter in (*kind, *kind.upper()) if letter.isalpha() and letter not in letters.values())
        letters[kind] = next(free, "?")
    return letters
