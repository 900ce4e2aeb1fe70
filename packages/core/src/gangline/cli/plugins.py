"""`gangline plugins`: every part, who supplies it, what failed and why, and what could be installed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gangline.cli import wide_open
from gangline.errors import EXIT_USER_ERROR
from gangline.plugin import catalogue
from gangline.plugin.discovery import version_of
from gangline.plugin.registry import OFF, Installed, installed


def main(argv: Sequence[str]) -> int:
    """Print the tables; exit code 2 where two packages claim one name, for then no run can start."""
    parser = argparse.ArgumentParser(prog="gangline plugins", description="What is installed, from whom, what failed.")
    parser.add_argument("group", nargs="?", help="show this group alone")
    parser.add_argument("--names", action="store_true", help="print group=name lines and nothing else, for scripts")
    options = parser.parse_args(list(argv))
    found = installed()
    groups = [group for group in found.groups() if options.group in (None, group)]
    if options.names:
        for group in groups:
            print("\n".join(f"{group}={name}" for name in found.choices(group)))
        return 0
    _print(found, groups)
    return EXIT_USER_ERROR if found.clashes else 0


def _print(found: Installed, groups: list[str]) -> None:
    from rich.markup import escape

    console = wide_open()
    console.print(_installed(found, groups))
    notes = [
        f"{group}={name}: {offer.part.layout_dependent}"
        for group in groups
        for name, offer in found.offers(group).items()
        if offer.part.layout_dependent and not offer.viewed
    ]
    if notes:
        console.print("\n[bold]Depends on the layout[/]")
        for note in notes:
            console.print(f"  {escape(note)}", soft_wrap=True)
    if found.clashes or found.failures:
        console.print("\n[bold red]Cannot be used[/]")
        for what, mend in found.clashes:
            console.print(f"  {escape(what)}\n    {escape(mend)}", soft_wrap=True)
        told = {what for what, _ in found.clashes}
        for failure in found.failures:
            if not any(failure.supplier in what for what in told):
                console.print(f"  {escape(failure.supplier)} {escape(failure.why)}", soft_wrap=True)
                if failure.mend:
                    console.print(f"    {escape(failure.mend)}", soft_wrap=True)
    missing = [e for e in catalogue.ENTRIES if e.group in groups and e.name not in found.offers(e.group)]
    missing = [entry for entry in missing if version_of(entry.distribution) is None]
    if missing:
        console.print("\n[bold]Known, not installed[/]")
        console.print(_missing(missing))


def _installed(found: Installed, groups: list[str]):
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("group", "name", "what it does", "from", "version"):
        table.add_column(
            column, overflow="fold" if column == "what it does" else "ignore", no_wrap=column != "what it does"
        )
    for group in groups:
        offers = found.offers(group)
        rows = [(name, o.part.summary, o.distribution, o.version) for name, o in sorted(offers.items())]
        if OFF in found.choices(group) and OFF not in offers:
            rows.insert(0, (OFF, "Without it", "", ""))
        for row in rows:
            table.add_row(*(Text(cell) for cell in (group, *row)))
    return table


def _missing(entries: list[catalogue.KnownPart]):
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for entry in entries:
        table.add_row(f"  {entry.group}={entry.name}", entry.summary, catalogue.get(entry.distribution))
    return table
