"""Save requests: options of the checkpointer, and the last save after a signal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from gangline.checkpoint.base import SaveRequest
from gangline.config.schema import LaunchConfig
from gangline.train.save import make_request
from gangline.train.session import Session
from gangline_basics.launch.config import LocalLaunch


def session(launch: LaunchConfig) -> Session:
    return cast(Session, SimpleNamespace(step=7, run=SimpleNamespace(launch=launch)))


def test_save_without_request_uses_default_request() -> None:
    assert make_request(session(LocalLaunch()), None, stops=False) == SaveRequest(7)


def test_checkpointer_request_is_passed_to_save() -> None:
    mine = SaveRequest(7, tiers=("near",))
    assert make_request(session(LocalLaunch()), mine, stops=False) is mine


@pytest.mark.parametrize(
    ("launch", "watched", "seconds"),
    [
        (LocalLaunch(grace_seconds=20), True, 20),
        (LocalLaunch(grace_seconds=20), False, None),  # torchrun and Slurm have their own grace period
        (LaunchConfig(), True, None),
        (LocalLaunch(signal_seconds=30), False, 30),  # unless the user sets one
        (LocalLaunch(grace_seconds=20, signal_seconds=30), True, 20),
        (LocalLaunch(grace_seconds=60, signal_seconds=30), True, 30),
    ],
)
def test_save_after_signal_is_last_with_deadline(
    monkeypatch: pytest.MonkeyPatch, launch: LaunchConfig, watched: bool, seconds: float | None
) -> None:
    monkeypatch.setattr("gangline.launch.signals._watched", watched)
    mine = SaveRequest(7, tiers=("near",))
    assert make_request(session(launch), mine, stops=True) == SaveRequest(7, last=True, deadline_seconds=seconds)
