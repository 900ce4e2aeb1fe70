"""Weights & Biases tracker: wandb steps equal training steps, and all starts of a run continue one wandb run."""

from __future__ import annotations

import socket
import sys
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import wandb

from gangline.record import StepRecord
from gangline.track import Start
from gangline_track.background import Connection, get_lists, get_scalars
from gangline_track.config import Wandb
from gangline_track.run_id import RunId
from gangline_track.wandb_file import find_newest_step

LINES = 200  # maximum number of notes to send; older notes are dropped


class WandbConnection(Connection):
    """Run at Weights & Biases, with its local files in RUN_DIR/wandb."""

    def __init__(self, config: Wandb) -> None:
        self.config = config
        self.last: int | None = None  # newest step that was sent since this start

    def open(self, start: Start) -> int:
        run_id = RunId(start.directory, "wandb", f"{self.config.entity or ''}/{self.config.project}")
        name = run_id.read() or uuid.uuid4().hex[:16]
        mode, why = self.config.mode, ""
        try:
            if mode == "online":
                why = explain_no_service(self.config.connect_seconds)
                mode = "offline" if why else mode
            self.run = self._begin(start, name, mode)
        except Exception as error:  # for example an expired key, no network, or a project of another user
            if mode != "online":
                raise
            why = str(error).strip().splitlines()[0]
            wandb.teardown()  # otherwise wandb keeps the id of the failed run
            self.run = self._begin(start, name, "offline")
        if why:
            later = f"wandb sync {Path(start.directory) / 'wandb'}/offline-run-*"
            print(
                f"train: track=wandb continues offline: {why}\n  To upload the run later:  {later}",
                file=sys.stderr,
                flush=True,
            )
        if mode == "disabled":
            return 0
        run_id.write(name)
        return max(find_newest_step(start.directory, name), self.run.starting_step - 1)

    def _begin(self, start: Start, name: str, mode: Any) -> wandb.Run:
        config = self.config
        settings = wandb.Settings(
            init_timeout=config.connect_seconds,
            finish_timeout=config.deadline_seconds,
            silent=True,
            console="off",  # gangline stores the console output in the run directory
            disable_git=True,  # provenance.json has the commit
            disable_code=True,
            x_disable_stats=True,  # the step record has these measurements
        )
        return wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            name=start.name,
            id=name,
            resume="allow",
            dir=start.directory,
            mode=mode,
            config={**start.config, "parameters": start.parameters, "world": start.world, "attempt": start.attempt},
            allow_val_change=True,
            settings=settings,
        )

    def send(self, records: list[StepRecord]) -> None:
        for record in records:
            histograms = {name: wandb.Histogram(values) for name, values in get_lists(record).items()}
            self.run.log({**get_scalars(record), **histograms}, step=record.step)
            self.last = record.step

    def close(self, summary: dict[str, Any], notes: list[str], pictures: list[Path]) -> None:
        if notes:
            self.run.notes = "\n".join(notes[-LINES:])
        self.run.summary.update({f"run/{name}": value for name, value in summary.items() if value is not None})
        if (
            pictures and self.last is not None
        ):  # logged at the last sent step, because a new step would count as a training step
            self.run.log({f"pictures/{path.stem}": wandb.Image(str(path)) for path in pictures}, step=self.last)
        self.run.finish(exit_code=0 if summary.get("why") == "done" else 1)


def explain_no_service(seconds: float) -> str:
    """Log in to wandb, and return why it failed, or "". With an API key, first checks that the service is reachable."""
    if wandb.api.api_key and (why := explain_unreachable(wandb.setup().settings.base_url, seconds)):
        return why
    return "" if wandb.login(prompt=False) else "no wandb API key: run `wandb login`, or set WANDB_API_KEY"


def explain_unreachable(url: str, seconds: float) -> str:
    """Return why a connection to the service fails; "" if it succeeds, or if a proxy is configured.

    wandb may wait forever for a service whose machine refuses connections.
    """
    place = urlsplit(url)
    if getproxies() or place.hostname is None:
        return ""
    try:
        socket.create_connection(
            (place.hostname, place.port or (80 if place.scheme == "http" else 443)), seconds
        ).close()
    except OSError as error:
        return f"cannot connect to {url}: {error}"
    return ""


def connect(config: Wandb) -> WandbConnection:
    """Return the connection that the tracker's thread uses."""
    return WandbConnection(config)
