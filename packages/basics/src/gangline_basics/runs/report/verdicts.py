"""Failures, verdicts and notices of a run, from events.jsonl and metrics.jsonl, oldest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from gangline_basics.runs.report.history import NOTES, History
from gangline_basics.runs.report.markup import make, make_details, make_note, make_section, make_table

MOST = 200  # maximum number of rows of each table
RESPONSES = ("response",)  # events (events.jsonl) that record the response to a verdict
REQUESTED = ("signal", "preempted")  # reasons of endings that a user or a scheduler requested
LOST = ("rank", "node")  # reasons of launches after a failure
NOTICE, WARNING = "note", "warn"  # suggested actions of a verdict that only informs or warns


@dataclass(frozen=True)
class Incident:
    """One event. grave: whether it is a failure or asks for an action. warns: whether it only asks for attention."""

    when: str
    what: str
    words: str
    grave: bool = True
    warns: bool = False


def list_incidents(history: History) -> Iterator[Incident]:
    """Yield the events that a reader of a report must know."""
    for event in history.events:
        kind, when = event.get("event"), _format_when(event)
        words = str(event.get("evidence") or event.get("why") or "")
        if kind == "verdict":
            grave = event.get("suggestion") != NOTICE
            what = f"verdict {event.get('kind')} ({event.get('where')})"
            suggestion = f"suggestion: {event.get('suggestion') or 'not recorded'}"
            warns = event.get("suggestion") == WARNING
            yield Incident(when, what, f"{words}; {suggestion}" if words else suggestion, grave, warns)
        elif kind in RESPONSES:
            kinds = event.get("kinds")
            answered = ", ".join(map(str, kinds)) if isinstance(kinds, list) else ""
            yield Incident(when, f"action {event.get('action')}", f"answers {answered or 'no verdict'}", grave=False)
        elif kind == "launch" and event.get("why") != "start":
            yield Incident(when, f"restart ({event.get('why')})", words, event.get("why") in LOST)
        elif kind == "end" and event.get("why") not in ("done", None):
            yield Incident(when, f"end of the ranks ({event['why']})", words, event["why"] in ("error", "stop"))
        elif kind == "exit" and event.get("reason") != "done":
            yield Incident(when, f"end of the job ({event.get('reason')})", words, event.get("reason") not in REQUESTED)
        elif kind == "fault":
            yield Incident(when, f"injected fault ({event.get('kind')})", f"rank {event.get('rank')}")


def list_failures(history: History) -> list[Incident]:
    """Return the failures of a run and the verdicts that ask for an action, oldest first."""
    return [incident for incident in list_incidents(history) if incident.grave]


def describe_incident(incident: Incident) -> str:
    """Return an incident as one line."""
    return f"{incident.when}, {incident.what}: {' '.join(incident.words.split())}"


def show_verdicts(history: History) -> Element:
    """Return the section of failures, verdicts and notices."""
    incidents = list(list_incidents(history))
    failures, others = list_failures(history), [incident for incident in incidents if not incident.grave]
    skipped = [(f"step {step}", "update skipped", reason) for step, reason in history.skipped]
    notes = [(f"step {step}", "notice", note) for step, note in history.notes]
    more = [_get_row(incident) for incident in others] + skipped + notes
    if history.note_count > NOTES:
        more.append(("", "", f"{history.note_count - NOTES} more notices are in metrics.jsonl."))
    return make_section(
        "Verdicts and notices",
        _make_incident_table([_get_row(failure) for failure in failures])
        if failures
        else make("p", "No failure and no verdict that asks for an action is recorded."),
        make_details(f"{len(more)} notices, actions and skipped updates", _make_incident_table(more)) if more else None,
    )


def _get_row(incident: Incident) -> tuple[str, str, str]:
    return (incident.when, incident.what, incident.words)


def _make_incident_table(rows: list[tuple[str, str, str]]) -> Element:
    table = make_table(("when", "what", "evidence"), rows[:MOST])
    return make("div", table, make_note(f"{len(rows) - MOST} more rows are left out.") if len(rows) > MOST else None)


def _format_when(event: dict[str, Any]) -> str:
    time = str(event.get("time", "")).replace("T", " ").partition(".")[0]
    return f"step {event['step']}, {time}" if "step" in event else time
