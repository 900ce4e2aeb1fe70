"""`health.monitors.saves`: a failed save is reported; consecutive failures with one reason are reported once."""

from __future__ import annotations

from dataclasses import replace

from gangline_health.monitors.saves import SavesMonitor
from gangline_testkit.health import make_healthy

FULL, GONE = "No space left on device (/runs/a)", "the store is lost"


def test_save_failure_is_reported_once_per_episode() -> None:
    monitor = SavesMonitor()
    why = {3: FULL, 4: FULL, 5: GONE, 6: None, 7: FULL}
    said = {}
    for record in make_healthy(10):
        saved = "step-00000001" if record.step == 2 else None
        for verdict in monitor.observe(replace(record, failed_save=why.get(record.step), saved=saved)):
            said[record.step] = verdict
    assert sorted(said) == [4, 6, 8], "in the step after the one whose record has it"
    assert all(verdict.kind == "not-saved" for verdict in said.values())
    assert FULL in said[4].evidence
    assert "newest complete checkpoint: step 2" in said[4].evidence
    assert GONE in said[6].evidence
