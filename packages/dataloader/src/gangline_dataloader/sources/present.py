"""Check before a run that the files of stores exist with the right sizes; checksums are verified at the first read."""

from __future__ import annotations

from collections.abc import Sequence

from gangline import Problem
from gangline_dataloader.sources.split import SplitRows
from gangline_dataloader.store.stored import StoreTokens

NAMED = 3  # maximum number of files named in a message


def find_file_problems(parts: Sequence[SplitRows]) -> list[Problem]:
    """Return one problem for each store with files that are missing or differ in size from the manifest or plan."""
    store_files: dict[tuple[str, str], tuple[StoreTokens, dict[str, int]]] = {}
    for one in parts:
        if isinstance(one.store, StoreTokens):
            _, files = store_files.setdefault((one.store.name, one.store.identity), (one.store, {}))
            files.update(one.store.get_expected_sizes() | ({} if one.plan is None else one.plan.get_expected_sizes()))
    return [problem for store, files in store_files.values() for problem in _check_store(store, files)]


def _check_store(store: StoreTokens, wanted: dict[str, int]) -> list[Problem]:
    sizes = store.find_file_sizes(list(wanted))
    missing_files = [name for name, size in sizes.items() if size is None]
    other = [
        f"{name} ({size} bytes, expected {wanted[name]})"
        for name, size in sizes.items()
        if size not in (None, wanted[name])
    ]
    if not missing_files and not other:
        return []
    reasons = [f"Missing: {_format_names(missing_files)}."] * bool(missing_files) + [
        f"Wrong size: {_format_names(other)}."
    ] * bool(other)
    what = f"{store.name}: {len(missing_files) + len(other)} of {len(wanted)} files are missing or have the wrong size."
    fix = f"Copy these files again, or rerun the preparation. To check all files:  gangline data verify {store.name}"
    return [Problem(what, " ".join(reasons), fix)]


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
