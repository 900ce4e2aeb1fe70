"""The options of track=wandb, track=mlflow and track=trackio. Torch-free, and free of their libraries."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from gangline import Part, Problem
from gangline.config import PositiveFloat, PositiveInt, TrackConfig

if TYPE_CHECKING:
    from gangline.config import Run


@dataclass
class Service(TrackConfig):
    """What all of them have. The run's steps never wait for the service: a queue and a thread stand between."""

    module: ClassVar[str] = ""  # of the service's own library
    extra: ClassVar[str] = ""  # of gangline-track
    home: ClassVar[str] = ""  # the module of its `Connection`

    project: str = "gangline"  # where its runs are kept together
    every: PositiveInt = 1  # of so many steps one is sent; those with a validation loss always
    queue: PositiveInt = 10_000  # records that wait for a slow service; those beyond it are left out
    deadline_seconds: PositiveFloat = 30.0  # how long the run's end waits for what is still to be sent

    def check(self, run: Run) -> list[Problem]:
        if find_spec(self.module) is None:
            what = f"track={self.extra} needs the library {self.module}, and it is not installed."
            why = "It is an extra of gangline-track."
            return [Problem(what, why, f"pip install 'gangline-track[{self.extra}]'   or another tracker")]
        return []


@dataclass
class Wandb(Service):
    """Weights & Biases. Without a key or a network it goes on offline, in the run directory, and says so."""

    module: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"
    home: ClassVar[str] = "gangline_track.to_wandb"

    mode: Literal["online", "offline", "disabled"] = "online"  # offline: `wandb sync` sends it later
    entity: str | None = None  # user or team; null: the key's own
    group: str | None = None  # under which runs are shown together
    tags: list[str] = field(default_factory=list)  # words to find the run by
    connect_seconds: PositiveFloat = 60.0  # how long it tries to reach the service before it goes on offline


@dataclass
class Mlflow(Service):
    """MLflow: a tracking server, or a file of SQLite."""

    module: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"
    home: ClassVar[str] = "gangline_track.to_mlflow"

    uri: str | None = None  # of the tracking server; null: MLFLOW_TRACKING_URI, else mlflow.db in the run directory

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
        lacks = [name for name in ("sqlalchemy", "alembic") if find_spec(name) is None]
        if not problems and uri.startswith("sqlite:") and lacks:
            what = f"track=mlflow keeps a file of SQLite, and lacks {' and '.join(lacks)} for it."
            problems.append(Problem(what, "", "pip install 'gangline-track[mlflow]'   or track.mlflow.uri=http://..."))
        return problems


@dataclass
class Trackio(Service):
    """Trackio: a file of SQLite on this machine, a Space of Hugging Face, or a server of one's own."""

    module: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"
    home: ClassVar[str] = "gangline_track.to_trackio"
    file_options: ClassVar[tuple[str, ...]] = ("path",)

    path: str | None = None  # the folder of its files; null: TRACKIO_DIR, else where `trackio show` looks
    space: str | None = None  # a Space's name, USER/NAME; null: nothing leaves this machine
    server: str | None = None  # a server's address; null: none

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        if self.space and self.server:
            what = "track.trackio.space and track.trackio.server are two places, and a run is sent to one."
            problems.append(Problem(what, "", "track.trackio.space=null   or   track.trackio.server=null"))
        return problems

    def get_environment(self, run: Run) -> dict[str, str]:
        return {"TRACKIO_DIR": str(Path(self.path).absolute())} if self.path else {}


PARTS = (
    Part(
        name="wandb",
        config=Wandb,
        build="gangline_track.background:build",
        summary="Weights & Biases: online, offline or disabled",
    ),
    Part(
        name="mlflow",
        config=Mlflow,
        build="gangline_track.background:build",
        summary="MLflow: a tracking server, or a file of SQLite",
    ),
    Part(
        name="trackio",
        config=Trackio,
        build="gangline_track.background:build",
        summary="Trackio: a file of SQLite here, a Space, or a server",
    ),
)
