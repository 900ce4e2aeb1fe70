"""`gangline conform DIST`: run the conformance suites on every part of an installed distribution, and print a table.

Claims come from the test file of --tests, else from ./tests/test_conformance.py. If neither exists, the parts have no
claims, and the table lists the claims that would pass.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.cli import open_console
from gangline.errors import UserError
from gangline.plugin.discovery import Offer
from gangline.plugin.registry import installed

if TYPE_CHECKING:
    from gangline_testkit.report import Result

OWN = Path("tests", "test_conformance.py")
COLUMNS = ("part", "suite", "claims", "passed", "failed", "remarks")


def main(argv: Sequence[str]) -> int:
    """Return 0 if every suite passes, else 1. Raises UserError if the distribution is not installed or has no parts."""
    parser = argparse.ArgumentParser(prog="gangline conform", description=__doc__)
    parser.add_argument(
        "distribution", metavar="DIST", help="name of the installed distribution, such as gangline-mine"
    )
    parser.add_argument(
        "--tests",
        type=Path,
        metavar="FILE",
        help=f"test file with the suites and claims of the plugin (default: {OWN}, if the file exists)",
    )
    parser.add_argument("--markdown", action="store_true", help="Markdown table, for a README")
    options = parser.parse_args(argv)
    offers, verbs = find_offers(options.distribution)
    tests = options.tests or (OWN if OWN.exists() else None)
    if tests is not None and not tests.is_file():
        raise UserError(f"--tests: no file {tests}.", "Omit --tests to run the suites without claims.")
    results = conform(offers, verbs, tests)
    show(results, options.distribution, options.markdown)
    return 1 if any(result.failed for result in results) else 0


def find_offers(distribution: str) -> tuple[list[Offer], list[str]]:
    """Return the parts and the commands of a distribution. Raises UserError, with the cause, if there are none."""
    plugins = installed()
    for failure in plugins.failures:
        if _is_same_name(failure.distribution, distribution):
            raise UserError(f"{failure.supplier} {failure.why}", failure.fix)
    every = [
        offer for group in plugins.list_groups() for offer in plugins.get_offers(group).values() if not offer.viewed
    ]
    offers = [offer for offer in every if _is_same_name(offer.distribution, distribution)]
    verbs = plugins.list_verbs(distribution)
    if not offers and not verbs:
        names = ", ".join(sorted({offer.distribution for offer in every if offer.distribution}))
        raise UserError(
            f"no installed plugin is called {distribution}, or the plugin has neither parts nor commands.",
            f"Installed plugins: {names}.   (gangline plugins lists their parts, and plugins that failed to import)",
        )
    return offers, verbs


def conform(offers: Sequence[Offer], verbs: Sequence[str], tests: Path | None) -> list[Result]:
    """Run the suites in this process, and return a result for each part and each command. tests: None for no claims."""
    from gangline_testkit import report

    with tempfile.TemporaryDirectory(prefix="gangline-conform-") as folder:
        if tests is None:
            tests = Path(folder, "test_conformance.py")
            tests.write_text(report.generate_tests(offers, verbs), encoding="utf-8")
        results = report.run_file(tests.resolve())
    suites = {f"{offer.group}={offer.part.name}": report.find_suite(offer) for offer in offers}
    suites |= {f"gangline {verb}": "gangline_testkit:CommandSuite" for verb in verbs}
    rows = []
    for choice, suite in suites.items():
        own_results = [result for result in results if result.choice == choice]
        missing = report.Result(
            choice, suite.partition(":")[2], failed={"": f"{tests} has no suite class for this choice"}
        )
        rows += own_results or [missing]
    return rows


def show(results: Sequence[Result], distribution: str, markdown: bool) -> None:
    """Print the table of results, then the failures."""
    rows = [_format_cells(result) for result in results]
    if markdown:
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(*COLUMNS, title=f"conformance of {distribution}", title_justify="left")
        for row in rows:
            table.add_row(*map(Text, row))
        open_console().print(table)
    for result in results:
        for test, why in result.failed.items():
            print(f"FAILED {result.choice} {test}: {why}")


def _format_cells(result: Result) -> tuple[str, ...]:
    remarks = [f"could claim {word}" for word in sorted(result.could_claim)]
    remarks += [f"waives {waiver}" for waiver in result.waived]
    claims = ", ".join(sorted(result.claims))
    return result.choice, result.suite, claims, str(result.passed), str(len(result.failed)), "; ".join(remarks)


def _is_same_name(one: str, other: str) -> bool:
    """Return whether two names of distributions are equal after packaging's normalisation."""
    plain = re.compile(r"[-_.]+")
    return plain.sub("-", one).lower() == plain.sub("-", other).lower()
