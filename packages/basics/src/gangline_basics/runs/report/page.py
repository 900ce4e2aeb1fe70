"""The page: one HTML file without scripts, which loads nothing and allows no source but its own styles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

from gangline_basics.runs.report.comparison import show_comparison
from gangline_basics.runs.report.curves import show_curves
from gangline_basics.runs.report.experts import show_experts
from gangline_basics.runs.report.heading import show_head
from gangline_basics.runs.report.history import DAMAGE, History
from gangline_basics.runs.report.layout import show_layout
from gangline_basics.runs.report.markup import make, make_note, make_section, write_html
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
    sections: list[tuple[str, Callable[[], Element | None]]] = [
        ("Curves", lambda: show_curves(history)),
        ("Time", lambda: show_time(history, account)),
        ("Verdicts and notices", lambda: show_verdicts(history)),
        ("Experts", lambda: show_experts(history)),
        ("Layout", lambda: show_layout(history)),
        ("Configuration", lambda: show_settings(history)),
        ("Provenance", lambda: show_origin(history)),
    ]
    blocks = [_show_section(title, show) for title, show in sections]
    return [show_head(history, account), *(block for block in blocks if block is not None)]


def _show_section(title: str, show: Callable[[], Element | None]) -> Element | None:
    """Return a section, or the reason if a damaged file makes it impossible, so that the other sections remain."""
    try:
        return show()
    except DAMAGE as error:
        return make_section(title, make_note(f"A file of the run is damaged: {type(error).__name__}: {error}"))
