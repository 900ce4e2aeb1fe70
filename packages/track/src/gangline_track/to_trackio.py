"""Trackio tracker. The run name gets a random suffix, because Trackio identifies runs by name."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import trackio

from gangline.record import StepRecord
from gangline.track import Start
from gangline_track.background import Connection, get_lists, get_scalars
from gangline_track.config import Trackio
from gangline_track.run_id import RunId


class TrackioConnection(Connection):
    """Run at Trackio, stored on this machine unless `space` or `server` is set."""

    def __init__(self, config: Trackio) -> None:
        self.config = config

    def open(self, start: Start) -> int:
        config = self.config
        run_id = RunId(start.directory, "trackio", f"{config.space or config.server or ''} {config.project}")
        name = run_id.read()
        self.run = trackio.init(
            project=config.project,
            name=name or f"{start.name}-{uuid.uuid4().hex[:6]}",
            space_id=config.space,
            server_url=config.server,
            config={**start.config, "parameters": start.parameters, "world": start.world},
            resume="allow" if name else "never",
            embed=False,
            auto_log_cpu=False,  # step records have CPU and GPU measurements
            auto_log_gpu=False,
        )
        run_id.write(self.run.name)
        self.newest = self.run._next_step - 1  # private attribute: next step of the run, which Trackio reads in `init`
        return max(self.newest, 0)

    def send(self, records: list[StepRecord]) -> None:
        for record in records:
            histograms = {name: trackio.Histogram(values) for name, values in get_lists(record).items() if values}
            self.run.log({**get_scalars(record), **histograms}, step=record.step)
            self.newest = record.step

    def close(self, summary: dict[str, Any], notes: list[str], pictures: list[Path]) -> None:
        end: dict[str, Any] = {f"run/{name}": value for name, value in summary.items() if value is not None}
        if notes:
            end["notes"] = trackio.Markdown("\n\n".join(notes))
        end |= {f"pictures/{path.stem}": trackio.Image(str(path)) for path in pictures}
        self.run.log(end, step=max(self.newest, 0))
        self.run.finish()


def connect(config: Trackio) -> TrackioConnection:
    """Return the connection that the tracker's thread uses."""
    return TrackioConnection(config)
