"""Columns of a table: choice of the token column, and check of mask and label columns that exclude tokens."""

from __future__ import annotations

from collections.abc import Sequence

from gangline import UserError

USUAL = ("input_ids", "tokens")
# Column -> largest value that excludes a token from the loss: 0 of a mask; labels use -100, torch's ignore_index.
UNTRAINED = {"attention_mask": 0, "loss_mask": 0, "completion_mask": 0, "assistant_masks": 0, "labels": -1}


def choose_column(name: str, columns: Sequence[str], option: str | None) -> str:
    """Choose the column `option`, else the default or only column. Raises UserError if there is no such column."""
    if option is None:
        candidates = [one for one in USUAL if one in columns] or (list(columns) if len(set(columns)) == 1 else [])
        if candidates:
            return _check_unique(name, columns, candidates[0])
        raise UserError(
            f"the token column of {name} is ambiguous.",
            f"Columns: {', '.join(columns)}. Default columns: {', '.join(USUAL)}.",
            "data.column=NAME",
        )
    if option not in columns:
        raise UserError(f"{name} has no column {option}.", f"Columns: {', '.join(columns)}.", "data.column=NAME")
    return _check_unique(name, columns, option)


def _check_unique(name: str, columns: Sequence[str], column: str) -> str:
    if (count := list(columns).count(column)) > 1:
        raise UserError(
            f"{name} has {count} columns called {column}.",
            "The token column is ambiguous.",
            "Write the file again with unique column names.",
        )
    return column


def check_trained(name: str, tokens: str, beside: str, lowest: float | None) -> None:
    """Raise UserError if the lowest value of the column `beside` marks padding, or tokens outside of the loss."""
    if lowest is None or not lowest <= UNTRAINED[beside]:  # also for NaN
        return
    expression = f"[t for t, m in zip(row['{tokens}'], row['{beside}']) if m > {UNTRAINED[beside]}]"
    raise UserError(
        f"{name}: column {beside} contains {int(lowest)}, which marks padding or masked tokens in {tokens}.",
        f"A run would train on every token of {tokens}.",
        "To remove these tokens with Hugging Face datasets:",
        f"  ds.map(lambda row: {{'{tokens}': {expression}}}, remove_columns=ds.column_names)",
        f"To train on every token, remove the column: ds.remove_columns('{beside}')",
    )
