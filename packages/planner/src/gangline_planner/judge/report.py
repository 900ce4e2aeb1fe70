"""`gangline plan judge`: a file of rows, judged, as text and as data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline_planner.judge.calibrated import calibrated_rows, elsewhere, identity
from gangline_planner.judge.rows import Judgeable, Row, Unjudged, judgeable
from gangline_planner.judge.summary import Judged, Spread, by_table, slope, slope_interval
from gangline_planner.price.step import step_time


@dataclass(frozen=True)
class Report:
    """Rows that are judged, and others with the reason why not."""

    judged: tuple[Judged, ...]
    left_out: tuple[tuple[str, str], ...]  # (id, reason)

    @property
    def fresh(self) -> list[Judged]:
        """Rows that nothing was fitted on."""
        return [row for row in self.judged if not row.calibrated]


def rows_of(path: str) -> list[Row]:
    """Rows of a JSON file: a list of objects, or an object with such a list as `rows`. Raises UserError."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}.", str(error)) from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no JSON.", str(error)) from error
    if isinstance(found, dict):
        found = found.get("rows")
    if not found or not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UserError(f"{path} holds no rows.", "It is to be a list of objects, one for each measurement.")
    return found


def judge_file(path: str) -> Report:
    """Every row of a file. Raises UserError for a file that holds none."""
    return judge(rows_of(path))


def judge(rows: Iterable[Row]) -> Report:
    judged, left_out = [], []
    for index, row in enumerate(rows):
        name = str(row.get("id") or f"row {index}")
        try:
            judged.append(judged_row(name, judgeable(row)))
        except Unjudged as reason:
            left_out.append((name, str(reason)))
        except UserError as reason:
            left_out.append((name, reason.what))
    return Report(tuple(judged), tuple(left_out))


def judged_row(name: str, case: Judgeable) -> Judged:
    """A row with its prediction."""
    table = str(case.row.get("table") or "")
    published = case.memory
    return Judged(
        id=name,
        table=table,
        world=case.explained.mesh.world,
        published=case.seconds,
        predicted=step_time(case.explained, case.cluster).seconds,
        published_bytes=published,
        predicted_bytes=case.explained.ranks[case.explained.fullest].memory if published else None,
        calibrated=identity(case.row) in calibrated_rows(),
        assumed=case.assumed,
    )


def as_data(report: Report) -> dict[str, Any]:
    """Everything as plain data."""
    fresh = report.fresh
    found: dict[str, Any] = {
        "judged": len(report.judged),
        "total": len(report.judged) + len(report.left_out),
        "rows": [{**asdict(row), "error": row.error, "memory_error": row.memory_error} for row in report.judged],
        "left_out": [{"id": name, "reason": reason} for name, reason in report.left_out],
        "tables": {name: asdict(spread) for name, spread in by_table(report.judged).items()},
    }
    if fresh:
        low, high = slope_interval(fresh)
        found["fresh"] = asdict(Spread.of([row.error for row in fresh]))
        found["fresh"] |= {"slope": slope(fresh), "slope_low": low, "slope_high": high}
    else:
        found["elsewhere"] = dict(elsewhere())
    memory = [row.memory_error for row in report.judged if row.memory_error is not None]
    if memory:
        found["memory"] = asdict(Spread.of(memory))
    return found


def as_text(report: Report) -> str:
    """The whole page."""
    return "\n".join([*_rows(report), "", *_left_out(report), "", *_summary(report)])


def _rows(report: Report) -> Iterable[str]:
    yield f"{'row':34} {'GPUs':>6} {'published':>10} {'predicted':>10} {'error':>8}  {'memory':>8}"
    for row in report.judged:
        memory = "" if row.memory_error is None else f"{row.memory_error:+8.1%}"
        notes = "  fitted on" * row.calibrated + f"  ({', '.join(row.assumed)} assumed)" * bool(row.assumed)
        times = f"{row.published:8.4g} s {row.predicted:8.4g} s {row.error:+8.1%}"
        yield f"{row.id:34} {row.world:6} {times}  {memory:>8}{notes}"


def _left_out(report: Report) -> Iterable[str]:
    yield f"not judged: {len(report.left_out)} of {len(report.left_out) + len(report.judged)}"
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
        yield f"  {name:32} {_line(spread)}{f'  fitted on {used[name]}' * (used[name] > 0)}"
    fresh = report.fresh
    if used:
        yield f"  {'those that were fitted on':32} {_line(Spread.of([r.error for r in report.judged if r.calibrated]))}"
    if fresh:
        low, high = slope_interval(fresh)
        yield f"  {'all that nothing was fitted on':32} {_line(Spread.of([row.error for row in fresh]))}"
        yield (
            f"  over GPUs they drift by {slope(fresh):+.2%} with each factor e; 95 % of a bootstrap over tables: "
            f"{low:+.2%} to {high:+.2%}, {high - low:.2%} wide"
        )
    else:
        yield from _elsewhere()
    memory = [row.memory_error for row in report.judged if row.memory_error is not None]
    if memory:
        yield f"  {'memory':32} {_line(Spread.of(memory))}"


def _elsewhere() -> Iterable[str]:
    """What is known of rows that nothing was fitted on, where a file has none."""
    found = elsewhere()
    yield "  No row is left that nothing was fitted on. Of those that were, each table judged by a fit on the others:"
    spread = Spread(int(found["rows"]), found["median"], found["ninetieth"], found["bias"])
    yield f"  {'all tables, each left out':32} {_line(spread)}"
    yield (
        f"  over GPUs they drift by {found['slope']:+.2%} with each factor e; 95 % of a bootstrap over tables: "
        f"{found['slope_low']:+.2%} to {found['slope_high']:+.2%}"
    )


def _line(spread: Spread) -> str:
    return f"{spread.rows:5} {spread.median:8.1%} {spread.ninetieth:8.1%} {spread.bias:+8.1%}"
