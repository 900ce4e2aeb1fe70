"""Conformance suite for trackers, run on W&B, MLflow and Trackio with their own libraries and stores."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored import mlflow_history, trackio_history, wandb_ended, wandb_history

from gangline.track import Tracker
from gangline_testkit import TrackerSuite
from gangline_track.to_mlflow import make_local_uri


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the files of the tracking libraries apart from the user's own files."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TRACKIO_DIR"):
            patch.setenv(name, str(home))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield


class TestWandb(TrackerSuite):
    choice = "track=wandb"
    settings = ("track.wandb.mode=offline", "track.wandb.deadline_seconds=300")
    can = {"keeps"}

    def read_back(self, directory: Path) -> list[tuple[int, float]]:
        until = time.monotonic() + 60
        while not wandb_ended(directory) and time.monotonic() < until:
            time.sleep(0.05)
        return [(step, values["loss"]) for step, values in wandb_history(directory)]


@pytest.fixture(scope="class")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with MLflow's empty tables, which MLflow creates in a hundred migrations."""
    from mlflow import MlflowClient

    directory, elsewhere = tmp_path_factory.mktemp("tables"), tmp_path_factory.mktemp("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        MlflowClient(tracking_uri=make_local_uri(directory)).search_experiments()
    assert not list(elsewhere.iterdir())
    return directory


class TestMlflow(TrackerSuite):
    choice = "track=mlflow"
    settings = ("track.mlflow.deadline_seconds=300",)
    can = {"keeps"}

    @pytest.fixture(autouse=True)
    def _tables(self, tables: Path) -> None:
        self.tables = tables

    def build_tracker(self, directory: Path) -> Tracker:
        directory.mkdir(exist_ok=True)
        if not (directory / "mlflow.db").exists():  # saves time; real runs test that MLflow creates its tables
            shutil.copytree(self.tables, directory, dirs_exist_ok=True)
        return super().build_tracker(directory)

    def read_back(self, directory: Path) -> list[tuple[int, float]]:
        return mlflow_history(directory)


class TestTrackio(TrackerSuite):
    choice = "track=trackio"
    settings = ("track.trackio.deadline_seconds=300",)
    can = {"keeps"}

    def read_back(self, directory: Path) -> list[tuple[int, float]]:
        return trackio_history(directory)
