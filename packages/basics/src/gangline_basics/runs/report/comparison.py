"""Comparison of several runs: table of results, differing options, and overlaid curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from gangline_basics.runs.compare import find_differences, flatten_options
from gangline_basics.runs.report.curves import MAIN
from gangline_basics.runs.report.figures import render_svg
from gangline_basics.runs.report.heading import list_facts, show_head
from gangline_basics.runs.report.history import History
from gangline_basics.runs.report.markup import make, make_details, make_note, make_section, make_table
from gangline_basics.runs.report.plots import describe_lines, draw_metric
from gangline_basics.runs.report.settings import spell
from gangline_basics.runs.report.time import compute_account

METRICS = {"loss": "training loss (nats)", "validation_loss": "validation loss (nats)", **MAIN}


def show_comparison(histories: Sequence[History]) -> list[Element]:
    """Return the header and the sections of a page that compares runs."""
    names = [history.name for history in histories]
    accounts = [compute_account(history) for history in histories]
    facts = [dict(list_facts(history, account)) for history, account in zip(histories, accounts, strict=True)]
    rows = [("state", *(history.summary.state for history in histories))]
    rows += [(name, *(str(each[name]) for each in facts)) for name in facts[0]]
    different = find_differences([history.config for history in histories])
    flat = [flatten_options(history.config) for history in histories]
    # A part that one run lacks makes all of its options differ; they are collapsed.
    common = {key: row for key, row in different.items() if all(key in options for options in flat)}
    others = {key: row for key, row in different.items() if key not in common}
    notes = [make_note(f"{history.name}: {text}") for history in histories for text in history.missing]
    columns = range(1, len(names) + 1)
    return [
        make(
            "header",
            make("p", "gangline report", class_="kicker"),
            make("h1", f"Comparison of {len(histories)} runs"),
            make("p", ", ".join(str(history.path) for history in histories), class_="path"),
            *notes,
        ),
        make_section("Results", make_table(("", *names), rows, columns)),
        make_section(
            "Differing options",
            None if different else make("p", "The configurations of the runs are equal."),
            _make_option_table(names, flat, common) if common else None,
            make_details(f"{len(others)} options that not every run has", _make_option_table(names, flat, others))
            if others
            else None,
        ),
        _show_overlaid(histories),
        make_section(
            "Runs",
            *(
                make_details(history.name, show_head(history, account))
                for history, account in zip(histories, accounts, strict=True)
            ),
            make("p", "The complete report of one run: ", make("code", "gangline report RUN_DIR"), "."),
        ),
    ]


def _make_option_table(names: Sequence[str], flat: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> Element:
    """Return a table of options; a dash marks a run without the option."""
    rows = [(key, *(spell(key, options[key]) if key in options else "-" for options in flat)) for key in keys]
    return make_table(("option", *names), rows)


def _show_overlaid(histories: Sequence[History]) -> Element:
    figures, absent = [], []
    for metric, title in METRICS.items():
        lines = {each.name: each.series[metric] for each in histories if metric in each.series}
        if not lines:
            absent.append(title)
            continue
        lacking = [each.name for each in histories if each.name not in lines]
        caption = describe_lines(lines) + (f" Not recorded: {', '.join(lacking)}." if lacking else "")
        figures.append(render_svg(draw_metric(title, lines), caption))
    note = make_note(f"Not recorded by any run: {', '.join(absent)}.") if absent else None
    return make_section("Curves", make("div", *figures, class_="figures"), note)
