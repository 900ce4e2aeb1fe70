"""Run id of a run directory at a tracking service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gangline_track.run_id import RunId

PLACES = ["sqlite:///ml.db?apitoken=hunter2 gangline", "https://me:hunter2@host/x gangline", "https://hunter2@host p"]


@pytest.mark.parametrize("place", PLACES)
def test_run_id_is_stored_without_server_password(tmp_path: Path, place: str) -> None:
    known = RunId(tmp_path, "mlflow", place)
    known.write("run-1")
    assert "hunter2" not in known.path.read_text()
    assert RunId(tmp_path, "mlflow", place).read() == "run-1"
    assert RunId(tmp_path, "mlflow", place.replace("hunter2", "hunter3")).read() == "run-1"
    assert RunId(tmp_path, "mlflow", place + "2").read() is None


def test_run_id_file_of_older_version_loses_password(tmp_path: Path) -> None:
    known = RunId(tmp_path, "mlflow", PLACES[0])
    known.path.parent.mkdir()
    known.path.write_text(json.dumps({"id": "run-1", "place": PLACES[0]}))
    assert known.read() == "run-1"
    assert "hunter2" not in known.path.read_text()
    assert known.read() == "run-1"


@pytest.mark.parametrize("content", ["{", "[]", '{"id": 1}', '{"id": "a", "place": 3}'])
def test_run_id_of_a_damaged_file_is_none(tmp_path: Path, content: str) -> None:
    known = RunId(tmp_path, "mlflow", PLACES[0])
    known.path.parent.mkdir()
    known.path.write_text(content)
    assert known.read() is None
