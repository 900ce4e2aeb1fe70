"""MLflow tracker: logs to one MLflow run by `MlflowClient`, without changing the active MLflow run of the process."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from gangline.record import StepRecord
from gangline.track import Start
from gangline_track.background import Connection, flatten_options, get_scalars
from gangline_track.config import Mlflow
from gangline_track.run_id import RunId

# limits of MLflow: metrics per call, params per call, characters of a param value
METRICS, PARAMS, LENGTH = 1000, 100, 500
NOTE = "mlflow.note.content"  # tag that MLflow shows as the run's description
STATUS = {
    "done": "FINISHED",
    "stop": "FAILED",
    "error": "FAILED",
}  # reason of the end -> MLflow status; signals and other reasons: KILLED


class MlflowConnection(Connection):
    """Run at MLflow. Lists in records are not sent, because MLflow has no histograms."""

    def __init__(self, config: Mlflow) -> None:
        self.config = config

    def open(self, start: Start) -> int:
        # MLflow logs a line for each database table that it creates
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        uri = self.config.uri or os.environ.get("MLFLOW_TRACKING_URI") or make_local_uri(start.directory)
        self.client = MlflowClient(tracking_uri=uri)
        run_id = RunId(start.directory, "mlflow", f"{uri} {self.config.project}")
        self.id = run_id.read() or ""
        options = {key: str(value)[:LENGTH] for key, value in flatten_options(start.config).items()}
        if not self._goes_on():
            run = self.client.create_run(self._open_experiment(start.directory), run_name=start.name)
            self.id = run.info.run_id
            run_id.write(self.id)
        stored_params = self.client.get_run(self.id).data.params
        new = [Param(key, value) for key, value in options.items() if key not in stored_params]
        for first in range(0, len(new), PARAMS):
            self.client.log_batch(self.id, params=new[first : first + PARAMS])
        changes = [(key, value) for key, value in options.items() if stored_params.get(key, value) != value]
        tags = [("attempt", start.attempt), ("world", start.world), ("parameters", start.parameters), *changes]
        self.client.log_batch(self.id, tags=[RunTag(key, str(value)) for key, value in tags])
        return max((point.step for point in self.client.get_metric_history(self.id, "loss")), default=0)

    def _goes_on(self) -> bool:
        """Return whether the stored run exists and is not deleted; if so, set its status to running."""
        try:
            alive = self.id and self.client.get_run(self.id).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        if alive:
            self.client.update_run(self.id, status="RUNNING")
        return bool(alive)

    def _open_experiment(self, directory: str) -> str:
        experiment = self.client.get_experiment_by_name(self.config.project)
        if experiment is not None:
            return experiment.experiment_id
        here = not (self.config.uri or os.environ.get("MLFLOW_TRACKING_URI"))
        artifacts = (Path(directory) / "mlflow").absolute().as_uri() if here else None
        return self.client.create_experiment(self.config.project, artifact_location=artifacts)

    def send(self, records: list[StepRecord]) -> None:
        points = [
            Metric(name, value, int(record.time * 1000), record.step)
            for record in records
            for name, value in get_scalars(record).items()
        ]
        for first in range(0, len(points), METRICS):
            self.client.log_batch(self.id, metrics=points[first : first + METRICS])

    def close(self, summary: dict[str, Any], notes: list[str], pictures: list[Path]) -> None:
        tags = [RunTag(f"run.{name}", str(value)[:LENGTH]) for name, value in summary.items() if value is not None]
        if notes:
            tags.append(RunTag(NOTE, "\n\n".join(notes)[-5000:]))
        self.client.log_batch(self.id, tags=tags)
        for picture in pictures:
            self.client.log_artifact(self.id, str(picture), "pictures")
        self.client.set_terminated(self.id, status=STATUS.get(str(summary.get("why")), "KILLED"))


def make_local_uri(directory: str | Path) -> str:
    """Return the MLflow URI of the SQLite file in a run directory."""
    return f"sqlite:///{(Path(directory) / 'mlflow.db').absolute()}"


def connect(config: Mlflow) -> MlflowConnection:
    """Return the connection that the tracker's thread uses."""
    return MlflowConnection(config)
