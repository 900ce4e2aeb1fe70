"""Which column of a table holds the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from gangline import UserError

USUAL = ("input_ids", "tokens")


def chosen(name: str, columns: Sequence[str], asked: str | None) -> str:
    """The column that was asked for, else the usual or the only one. Raises UserError that lists them."""
    if asked is None:
        found = [one for one in USUAL if one in columns] or (list(columns) if len(set(columns)) == 1 else [])
        if found:
            return _once(name, columns, found[0])
        raise UserError(
            f"{name} does not say which column holds the tokens.",
            f"Columns: {', '.join(columns)}; {' and '.join(USUAL)} are known.",
            "data.column=NAME",
        )
    if asked not in columns:
        raise UserError(f"{name} has no column {asked}.", f"Columns: {', '.join(columns)}.", "data.column=NAME")
    return _once(name, columns, asked)


def _once(name: str, columns: Sequence[str], column: str) -> str:
    if (count := list(columns).count(column)) > 1:
        raise UserError(
            f"{name} has {count} columns called {column}.",
            "It does not say which of them holds the tokens.",
            "Write the file again with a name for each.",
        )
    return column
