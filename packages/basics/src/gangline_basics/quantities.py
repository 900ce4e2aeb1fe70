"""Numbers as text, for the console and the report of a run."""

from __future__ import annotations


def format_quantity(number: float) -> str:
    """Return a number with three significant digits and a metric prefix: 12345 -> "12.3 k"."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or unit == "T":
            return f"{number:.3g} {unit}" if unit else f"{number:.3g}"
        number /= 1000
    return ""
