"""Colours for the kinds of time, of memory and of actions, and letters for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from gangline_basics.figure import PALETTE

# the palette of Okabe and Ito, then colours for series that need not be distinguished by hue
COLOURS = (*PALETTE, "#8c510a", "#b8e186", "#762a83", "#999999", "#1a1a1a")
ACTIONS = dict(zip(("F", "B", "I", "W"), PALETTE, strict=False))
ACTION_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def get_colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def choose_letters(kinds: Iterable[str]) -> dict[str, str]:
    """Return a letter for each kind, one of its own that no earlier kind has; a capital if all are taken."""
    letters: dict[str, str] = {}
    for kind in kinds:
        free = (letter for letter in (*kind, *kind.upper()) if letter.isalpha() and letter not in letters.values())
        letters[kind] = next(free, "?")
    return letters
