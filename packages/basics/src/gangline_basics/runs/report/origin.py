"""Origin of a run: command, versions, code, data and machine of its starts, from provenance.json and parts.json."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any
from xml.etree.ElementTree import Element

from gangline.run.redaction import redact
from gangline_basics.runs.report.history import History
from gangline_basics.runs.report.markup import Child, make, make_details, make_note, make_section, make_table


def show_origin(history: History) -> Element:
    """Return the section of provenance."""
    facts = history.provenance
    starts = [start for start in facts.get("starts") or () if isinstance(start, dict)]
    if not starts:
        return make_section("Provenance", make_note("provenance.json records no start."))
    newest = starts[-1]
    data = [(name, facts.get(name)) for name in ("data", "validation")]
    data += [(f"validation set {name}", entry) for name, entry in dict(facts.get("validation_sets") or {}).items()]
    hashes: list[tuple[str, Child]] = [(name, _format_data(entry)) for name, entry in data]
    rows = [(str(start.get("time", "")), format_words(start), _format_changes(start)) for start in starts]
    return make_section(
        "Provenance",
        make("p", make("b", "Command: "), make("code", format_words(newest))),
        make_table(("fact of the newest start", "value"), [*_list_start(newest), *hashes]),
        make_details(f"{len(rows)} starts", make_table(("time", "command", "changed options"), rows)),
    )


def format_words(start: Mapping[str, Any]) -> str:
    """Return the command line of a start, without secrets."""
    return shlex.join(redact(str(word)) for word in start.get("command") or ())


def _list_start(start: Mapping[str, Any]) -> list[tuple[str, Child]]:
    code, machine = dict(start.get("code") or {}), dict(start.get("machine") or {})
    commits = [(f"git commit of {place}", _format_commit(entry)) for place, entry in code.items()]
    versions = [(f"version of {name}", str(version)) for name, version in dict(start.get("versions") or {}).items()]
    return [*commits, *versions, *((f"machine: {name}", str(value)) for name, value in machine.items())]


def _format_commit(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "none: not a git work tree"
    return f"{entry.get('commit')}{' with uncommitted changes' if entry.get('dirty') else ''}"


def _format_data(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "not recorded"
    return ", ".join(str(entry[key]) for key in ("fingerprint", "is") if entry.get(key))


def _format_changes(start: Mapping[str, Any]) -> str:
    return redact(", ".join(f"{key}={value}" for key, value in dict(start.get("changed") or {}).items()))
