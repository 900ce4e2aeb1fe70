"""What a rank asks of a save: as its checkpointer says, and all that is left to ask when a signal ends the run."""

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


def test_a_rank_that_asked_for_nothing_saves_with_the_others() -> None:
    assert make_request(session(LocalLaunch()), None, stops=False) == SaveRequest(7)


def test_what_a_checkpointer_asked_for_reaches_its_save() -> None:
    mine = SaveRequest(7, tiers=("near",))
    assert make_request(session(LocalLaunch()), mine, stops=False) is mine


@pytest.mark.parametrize(
    ("launch", "watched", "seconds"),
    [
        (LocalLaunch(grace_seconds=20), True, 20),
        (LocalLaunch(grace_seconds=20), False, None),  # torchrun, Slurm: they have a patience of their own
        (LaunchConfig(), True, None),
        (LocalLaunch(signal_seconds=30), False, 30),  # unless the user says which
        (LocalLaunch(grace_seconds=20, signal_seconds=30), True, 20),
        (LocalLaunch(grace_seconds=60, signal_seconds=30), True, 30),
    ],
)
def test_the_save_of_a_run_that_a_signal_ends_is_the_last_and_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, launch: LaunchConfig, watched: bool, seconds: float | None
) -> None:
    monkeypatch.setattr("gangline.launch.signals._watched", watched)
    mine = SaveRequest(7, tiers=("near",))
    assert make_request(session(launch), mine, stops=True) == SaveRequest(7, last=True, deadline_seconds=seconds)
