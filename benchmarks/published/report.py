"""Report published measurements next to their predictions, as text and as data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline_planner.accuracy import load_accuracy
from gangline_planner.price.step import compute_step_time
from published.calibrated import calibrated_rows, identity
from published.case import Case, case_of
from published.row import Row, Unjudged
from published.summary import Judged, Spread, by_table, slope, slope_interval


@dataclass(frozen=True)
class Report:
    """The judged rows, and the other rows with the reason."""

    judged: tuple[Judged, ...]
    left_out: tuple[tuple[str, str], ...]  # (id of the row, reason)

    @property
    def fresh(self) -> list[Judged]:
        """Return the judged rows to which no value was fitted."""
        return [row for row in self.judged if not row.calibrated]

    @property
    def total(self) -> int:
        return len(self.judged) + len(self.left_out)

    @property
    def memory(self) -> Spread | None:
        errors = [row.memory_error for row in self.judged if row.memory_error is not None]
        return Spread.of(errors) if errors else None


def read_rows(path: str) -> list[Row]:
    """Return the rows of a JSON file: a list of objects, or an object with such a list as `rows`. Raises UserError."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}.", str(error)) from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON.", str(error)) from error
    if isinstance(found, dict):
        found = found.get("rows")
    if not found or not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UserError(f"{path} contains no rows.", "It must be a list of objects, one for each measurement.")
    return list(map(Row, found))


def judge(rows: Iterable[Row]) -> Report:
    """Predict each row; rows that cannot be judged are listed with the reason."""
    judged, left_out = [], []
    for index, row in enumerate(rows):
        name = str(row.get("id") or f"row {index}")
        try:
            judged.append(judge_row(name, case_of(row)))
        except Unjudged as reason:
            left_out.append((name, str(reason)))
        except UserError as reason:
            left_out.append((name, reason.what))
    return Report(tuple(judged), tuple(left_out))


def judge_row(name: str, case: Case) -> Judged:
    """Predict the step time and the memory of a row."""
    explained, published = case.explained, case.memory
    return Judged(
        id=name,
        table=str(case.row.get("table") or ""),
        world=explained.mesh.world,
        published=case.seconds,
        predicted=compute_step_time(explained, case.cluster).seconds,
        published_bytes=published,
        predicted_bytes=explained.ranks[explained.fullest].memory if published else None,
        calibrated=identity(case.row) in calibrated_rows(),
        assumed=case.assumed,
    )


def as_data(report: Report) -> dict[str, Any]:
    """Return the report as plain data."""
    found: dict[str, Any] = {
        "judged": len(report.judged),
        "total": report.total,
        "rows": [{**asdict(row), "error": row.error, "memory_error": row.memory_error} for row in report.judged],
        "left_out": [{"id": name, "reason": reason} for name, reason in report.left_out],
        "tables": {name: asdict(spread) for name, spread in by_table(report.judged).items()},
    }
    if fresh := report.fresh:
        low, high = slope_interval(fresh)
        found["fresh"] = asdict(Spread.of_rows(fresh))
        found["fresh"] |= {"slope": slope(fresh), "slope_low": low, "slope_high": high}
    else:
        found["elsewhere"] = dict(load_accuracy())
    if report.memory:
        found["memory"] = asdict(report.memory)
    return found


def as_text(report: Report) -> str:
    """Return the report as lines."""
    return "\n".join([*_rows(report), "", *_left_out(report), "", *_summary(report)])


def _rows(report: Report) -> Iterable[str]:
    yield f"{'row':34} {'GPUs':>6} {'published':>10} {'predicted':>10} {'error':>8}  {'memory':>8}"
    for row in report.judged:
        memory = "" if row.memory_error is None else f"{row.memory_error:+8.1%}"
        notes = "  used in the fit" * row.calibrated + f"  ({', '.join(row.assumed)} assumed)" * bool(row.assumed)
        times = f"{row.published:8.4g} s {row.predicted:8.4g} s {row.error:+8.1%}"
        yield f"{row.id:34} {row.world:6} {times}  {memory:>8}{notes}"


def _left_out(report: Report) -> Iterable[str]:
    yield f"not judged: {len(report.left_out)} of {report.total}"
    for reason, count in Counter(reason for _, reason in report.left_out).most_common():
        names = [name for name, why in report.left_out if why == reason]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"  {count:4} {reason} ({', '.join(names[:3])}{more})"


def _summary(report: Report) -> Iterable[str]:
    if not report.judged:
        return
    yield f"{'errors of step time by table':34} {'rows':>5} {'median':>8} {'90th':>8} {'bias':>8}"
    used = Counter(row.table for row in report.judged if row.calibrated)
    for name, spread in by_table(report.judged).items():
        yield _line(name, spread) + f"  {used[name]} used in the fit" * (used[name] > 0)
    if used:
        yield _line("rows used in the fit", Spread.of_rows([row for row in report.judged if row.calibrated]))
    if fresh := report.fresh:
        low, high = slope_interval(fresh)
        yield _line("rows not used in the fit", Spread.of_rows(fresh))
        yield f"{_drift(slope(fresh), low, high)}, {high - low:.2%} wide"
    else:
        found = load_accuracy()
        known = "Stored errors of tables, each judged by a fit on the others:"
        yield f"  All rows were used in the fit. {known}"
        spread = Spread(int(found["rows"]), found["median"], found["ninetieth"], found["bias"])
        yield _line("all tables, each left out", spread)
        yield _drift(found["slope"], found["slope_low"], found["slope_high"])
    if report.memory:
        yield _line("memory", report.memory)


def _line(name: str, spread: Spread) -> str:
    return f"  {name:32} {spread.rows:5} {spread.median:8.1%} {spread.ninetieth:8.1%} {spread.bias:+8.1%}"


def _drift(slope: float, low: float, high: float) -> str:
    return (
        f"  drift of the error per factor e of GPUs: {slope:+.2%}; 95 % interval of a bootstrap over tables: "
        f"{low:+.2%} to {high:+.2%}"
    )
