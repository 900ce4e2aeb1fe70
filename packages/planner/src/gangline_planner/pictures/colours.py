"""Colours of kinds of time, memory and actions in figures, and their letters on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from gangline_basics.figure import PALETTE

# the palette of Okabe and Ito, then more colours that are harder to distinguish
COLOURS = (*PALETTE, "#8c510a", "#b8e186", "#762a83", "#999999", "#1a1a1a")
ACTIONS = dict(zip(("F", "B", "I", "W"), PALETTE, strict=False))
ACTION_WORDS = {"F": "forward", "B": "backward", "I": "backward (input gradients)", "W": "backward (weight gradients)"}


def get_colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def choose_letters(kinds: Iterable[str]) -> dict[str, str]:
    """Return a unique letter for each kind: the first free letter of its name, lower or upper case, else "?"."""
    letters: dict[str, str] = {}
    for kind in kinds:
        free = (letter for letter in (*kind, *kind.upper()) if letter.isalpha() and letter not in letters.values())
        letters[kind] = next(free, "?")
    return letters
