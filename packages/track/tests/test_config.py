"""Notice of trackers that replace the default trackers."""

from __future__ import annotations

import pytest

from gangline.config.compose import compose_one


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_tracker_without_jsonl_is_reported(name: str) -> None:
    run = compose_one(["recipe=quick", f"track={name}"])
    (notice,) = run.track[name].list_notices(run)
    assert f"track=[{name}] replaces the default trackers" in notice
    assert f"track=[console,jsonl,{name}]" in notice
    kept = compose_one(["recipe=quick", f"track=[console,jsonl,{name}]"])
    assert kept.track[name].list_notices(kept) == []
