"""Readers of the runs that the tracking services stored, through the services' own libraries if available."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from gangline_track.to_mlflow import make_local_uri
from gangline_track.wandb_file import read_history, read_messages


def known(directory: Path, service: str) -> str:
    """Return the id of the run at the service."""
    return json.loads((directory / "track" / f"{service}.json").read_text())["id"]


def wandb_history(directory: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (step, values) of all starts, in order."""
    name = known(directory, "wandb")
    found = []
    for file in sorted((directory / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")):
        for step, items in read_history(file):
            values = {key: json.loads(value) for key, value in items.items()}
            if "loss" in values:
                found.append((step, values))
    return found


def wandb_ended(directory: Path) -> bool:
    """Return whether the files of all starts are complete: wandb's own process may still write after `finish`."""
    protocol = import_module("wandb.proto.wandb_internal_pb2")
    ended = []
    for file in (directory / "wandb").glob("offline-run-*/run-*.wandb"):
        *_, last = read_messages(file)
        record = protocol.Record()
        record.ParseFromString(last)
        ended.append(record.HasField("exit"))
    return all(ended)


def mlflow_history(directory: Path) -> list[tuple[int, float]]:
    """Return (step, loss), sorted by step."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=make_local_uri(directory))
    points = client.get_metric_history(known(directory, "mlflow"), "loss")
    assert len({point.step for point in points}) == len(points), "a step shows twice"
    return sorted((point.step, point.value) for point in points)


def trackio_history(directory: Path, folder: Path | None = None) -> list[tuple[int, float]]:
    """Return (step, loss) in the order of the sends; folder: TRACKIO_DIR if it is not that of this process."""
    file = Path(folder or os.environ["TRACKIO_DIR"]) / "gangline.db"
    with closing(sqlite3.connect(file)) as base:
        asked = "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id"
        rows = base.execute(asked, (known(directory, "trackio"),)).fetchall()
    found = [(step, json.loads(metrics)) for step, metrics in rows]
    return [(step, float(values["loss"])) for step, values in found if "loss" in values]
