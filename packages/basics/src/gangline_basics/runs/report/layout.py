"""Layout of a run: mesh axes, ranks and nodes, as rank 0 recorded them at its newest start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from gangline.mesh import Mesh
from gangline_basics.runs.report.history import History
from gangline_basics.runs.report.markup import make, make_details, make_facts, make_note, make_section, make_table
from gangline_basics.runs.report.plots import format_number

MEANINGS = {
    "pp": "pipeline parallel",
    "dp_replicate": "data parallel, replicated weights",
    "dp_shard": "data parallel, sharded weights",
    "cp": "context parallel",
    "tp": "tensor parallel",
}
MOST_NODES = 64  # maximum number of nodes in the table


def show_layout(history: History) -> Element:
    """Return the section of the layout."""
    start = next((event for event in reversed(history.events) if event.get("event") == "start"), None)
    ranks = _show_ranks(history)
    if start is None:
        return make_section("Layout", make_note("events.jsonl has no start of the ranks, so the layout is not known."))
    nodes, sizes = [str(node) for node in start.get("nodes") or ()], dict(start.get("mesh") or {})
    starts = sum(event.get("event") == "start" for event in history.events)
    places = Counter(nodes)
    facts = [
        ("ranks", str(start.get("processes", "not recorded"))),
        ("nodes", str(len(places)) if places else "not recorded"),
        ("starts of the ranks", str(starts)),
    ]
    rows = [(axis, MEANINGS.get(axis, ""), str(size), find_link(axis, sizes, nodes)) for axis, size in sizes.items()]
    table = make_table(("axis", "meaning", "size", "link"), rows, (2,))
    listed = make_table(("node", "ranks"), [(name, str(n)) for name, n in list(places.items())[:MOST_NODES]], (1,))
    more = f"{len(places) - MOST_NODES} more nodes are in events.jsonl." if len(places) > MOST_NODES else ""
    note = make_note("The axes are in order of the ranks: neighbouring ranks differ in the last axis.")
    return make_section(
        "Layout",
        make_facts(facts),
        make("div", table, listed, class_="figures"),
        note,
        make_note(more) if more else None,
        ranks,
    )


def find_link(axis: str, sizes: dict[str, int], nodes: Sequence[str]) -> str:
    """Return whether the groups of a mesh axis stay inside a node; the kind of the link is not recorded."""
    if sizes[axis] == 1:
        return "none: one rank"
    try:
        mesh = Mesh.of(sizes)
        groups = [mesh.group(rank, [axis]) for rank in range(mesh.world)]
        if len(nodes) != mesh.world:
            return "not recorded"
    except ValueError:  # an axis that this version does not know
        return "not known"
    return "inside a node" if all(len({nodes[r] for r in group}) == 1 for group in groups) else "between nodes"


def _show_ranks(history: History) -> Element | None:
    """Return a table of the numbers that are recorded by rank."""
    lists = {name: row for name, row in history.lists.items() if name.startswith("rank_") and row}
    if not lists:
        return None
    rows = [
        (name, str(len(row)), *map(format_number, (min(row), max(row))), str(row.index(max(row))))
        for name, row in lists.items()
    ]
    head = ("metric (mean of the last 10 %)", "ranks", "minimum", "maximum", "rank of the maximum")
    return make_details("Numbers by rank", make_table(head, rows, range(1, 5)))
