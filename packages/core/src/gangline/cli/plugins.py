"""`gangline plugins`: tables of installed parts, of failed plugins, and of known parts that are not installed."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size

from gangline.errors import EXIT_USER_ERROR
from gangline.plugin import catalogue
from gangline.plugin.discovery import find_version
from gangline.plugin.registry import OFF, Installed, installed

WIDTH = 200  # width in characters of a table that is not written to a terminal
NARROWEST = 20  # minimum width of the summaries


def main(argv: Sequence[str]) -> int:
    """Print the tables; return 2 if package names clash, else 0. Raises UserError for an unknown group."""
    parser = argparse.ArgumentParser(prog="gangline plugins", description="List installed parts and failed plugins.")
    parser.add_argument("group", nargs="?", help="show only this group")
    parser.add_argument("--names", action="store_true", help="print only group=name lines, for scripts")
    options = parser.parse_args(list(argv))
    plugins = installed()
    if options.group is not None:
        plugins.refuse_unknown_group(options.group)
    groups = [group for group in plugins.list_groups() if options.group in (None, group)]
    if options.names:
        for group in groups:
            print("\n".join(f"{group}={name}" for name in plugins.find_choices(group)))
        return 0
    _print(plugins, groups)
    return EXIT_USER_ERROR if plugins.clashes else 0


def _print(found: Installed, groups: list[str]) -> None:
    _print_rows([("group", "name", "what it does", "from", "version"), *_iterate_rows(found, groups)])
    every = [offer for group in groups for offer in found.get_offers(group).values() if not offer.viewed]
    if offers := [offer for offer in every if offer.part.layout_dependent]:
        print("\nDepends on the layout")
        for offer in offers:
            print(f"  {offer.group}={offer.part.name}: {offer.part.layout_dependent}")
    if found.clashes or found.failures:
        print("\nCannot be used")
        for what, fix in found.clashes:
            print(f"  {what}\n    {fix}")
        for failure in found.failures:
            if not any(failure.supplier in what for what, _ in found.clashes):
                print(f"  {failure.supplier} {failure.why}" + (f"\n    {failure.fix}" if failure.fix else ""))
    missing = [e for e in catalogue.ENTRIES if e.group in groups and e.name not in found.get_offers(e.group)]
    missing = [entry for entry in missing if find_version(entry.distribution) is None]
    if missing:
        print("\nKnown parts that are not installed")
        _print_rows([("", f"{e.group}={e.name}", e.summary, catalogue.get(e.distribution)) for e in missing])


def _iterate_rows(found: Installed, groups: list[str]) -> Iterator[tuple[str, ...]]:
    for group in groups:
        offers = found.get_offers(group)
        if OFF in found.find_choices(group) and OFF not in offers:
            yield group, OFF, "without this part", "", ""
        for name, offer in sorted(offers.items()):
            yield group, name, offer.part.summary, offer.distribution, offer.version


def _print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table; its third column is wrapped to fit the terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    width = get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    widths[2] = min(widths[2], max(NARROWEST, width - sum(widths) + widths[2] - 2 * (len(widths) - 1)))
    for row in rows:
        folded = textwrap.wrap(row[2], widths[2]) or [""]
        for cells in [(*row[:2], folded[0], *row[3:]), *(("", "", line) for line in folded[1:])]:
            print("  ".join(cell.ljust(wide) for cell, wide in zip(cells, widths, strict=False)).rstrip())
