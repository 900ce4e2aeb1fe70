"""Summary of `benchmarks/published`: error statistics over many rows, and files without rows."""

from __future__ import annotations

import pytest

from gangline import UserError
from published.report import read_rows
from published.summary import Judged, Spread, by_table, slope, slope_interval


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"a": 1}', "contains no rows"),
        ("[]", "contains no rows"),
        ('["8 GPUs"]', "contains no rows"),
        (None, "cannot read"),
    ],
)
def test_file_without_rows_is_refused(tmp_path, content, message):
    path = tmp_path / "rows.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_rows(str(path))


def row(world: int, error: float, table: str = "a", calibrated: bool = False) -> Judged:
    return Judged("x", table, world, 1.0, 1.0 + error, None, None, calibrated)


def test_error_drift_with_scale_is_detected():
    drifting = [row(2**power, 0.01 * power, str(power % 3)) for power in range(3, 14)]
    assert slope(drifting) == pytest.approx(0.01 / 0.6931, rel=1e-3)
    low, high = slope_interval(drifting)
    assert low > 0
    assert high >= slope(drifting) >= low
    flat = [row(2**power, 0.05 * (-1) ** power, str(power)) for power in range(2, 14)]
    low, high = slope_interval(flat)
    assert low < 0 < high


def test_spread_matches_hand_computed_values():
    found = Spread.of([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9, -1.0])
    assert (found.rows, found.median, found.ninetieth) == (10, pytest.approx(0.55), pytest.approx(1.0))
    assert found.bias == pytest.approx(-0.05)
    assert list(by_table([row(8, 0.1, "a"), row(8, 0.3, "b"), row(8, -0.1, "a")])) == ["a", "b"]
