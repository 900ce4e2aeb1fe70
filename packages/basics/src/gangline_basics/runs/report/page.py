"""The page: one HTML file without scripts, which loads nothing and allows no source but its own styles."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from gangline_basics.runs.report.comparison import show_comparison
from gangline_basics.runs.report.curves import show_curves
from gangline_basics.runs.report.experts import show_experts
from gangline_basics.runs.report.heading import show_head
from gangline_basics.runs.report.history import History
from gangline_basics.runs.report.layout import show_layout
from gangline_basics.runs.report.markup import make, write_html
from gangline_basics.runs.report.origin import show_origin
from gangline_basics.runs.report.settings import show_settings
from gangline_basics.runs.report.style import STYLE
from gangline_basics.runs.report.time import compute_account, show_time
from gangline_basics.runs.report.verdicts import show_verdicts

GENERATOR = "gangline report"  # identifies the files that a later report may replace
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def build_page(histories: Sequence[History]) -> bytes:
    """Return the HTML of one run, or of a comparison of several runs."""
    if len(histories) > 1:
        title = f"Comparison of {', '.join(history.name for history in histories)}"
        blocks = show_comparison(histories)
    else:
        (history,) = histories
        title, blocks = history.summary.name, _show_run(history)
    sections = [block for block in blocks if block.tag == "section"]
    links = [make("a", block.findtext("h2"), href=f"#{block.get('id')}") for block in sections]
    head = make(
        "head",
        make("meta", charset="utf-8"),
        make("meta", name="generator", content=GENERATOR),
        make("meta", content=POLICY, **{"http_equiv": "Content-Security-Policy"}),
        make("meta", name="viewport", content="width=device-width, initial-scale=1"),
        make("meta", name="color-scheme", content="light dark"),
        make("title", f"{title} - gangline report"),
        make("style", STYLE),
    )
    nav = make("nav", *links, aria_label="Sections")
    header, *others = blocks
    return write_html(make("html", head, make("body", make("main", header, nav, *others)), lang="en"))


def _show_run(history: History) -> list[Element]:
    account = compute_account(history)  # may add to history.missing, which the head shows
    blocks = [
        show_head(history, account),
        show_curves(history),
        show_time(history, account),
        show_verdicts(history),
        show_experts(history),
        show_layout(history),
        show_settings(history),
        show_origin(history),
    ]
    return [block for block in blocks if block is not None]
