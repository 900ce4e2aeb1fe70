"""Options of track=wandb, track=mlflow and track=trackio. Imports neither torch nor the libraries of these services."""

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
    """Options of every tracking service. A separate thread sends the records, so no step waits for the service."""

    module: ClassVar[str] = ""  # module name of the service's library
    extra: ClassVar[str] = ""  # extra of gangline-track that installs the library, and the name of the tracker
    home: ClassVar[str] = ""  # module with the `connect` function of the service

    project: str = "gangline"  # project name at the tracking service
    # interval in steps between records sent to the service; records with a validation loss are always sent
    every: PositiveInt = 1
    queue: PositiveInt = 10_000  # maximum number of records queued for a slow service; further records are dropped
    deadline_seconds: PositiveFloat = 30.0  # timeout for sending the remaining records when the run ends, in seconds

    def check(self, run: Run) -> list[Problem]:
        if find_spec(self.module) is None:
            what = f"track={self.extra} needs the library {self.module}, which is not installed."
            why = "The library is an optional dependency of gangline-track."
            return [Problem(what, why, f"pip install 'gangline-track[{self.extra}]'   or choose another tracker")]
        return []

    def list_notices(self, run: Run) -> list[str]:
        """Return a notice if the run directory gets no records, because the choice replaced the default trackers."""
        if "jsonl" in run.track:
            return []
        chosen = ",".join(run.track)
        return [
            f"track=[{chosen}] replaces the default trackers: RUN_DIR gets no metrics.jsonl, so gangline runs, compare "
            f"and report show no curves; to keep it: track=[console,jsonl,{chosen}]"
        ]


@dataclass
class Wandb(Service):
    """Weights & Biases. Without an API key or a network, tracking continues offline, in the run directory."""

    module: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"
    home: ClassVar[str] = "gangline_track.to_wandb"

    mode: Literal["online", "offline", "disabled"] = "online"  # connection mode; offline: `wandb sync` uploads later
    entity: str | None = None  # user or team that owns the wandb run; null: the API key's default
    group: str | None = None  # name of the wandb group of the run; null: no group
    tags: list[str] = field(default_factory=list)  # tags of the wandb run
    connect_seconds: PositiveFloat = 60.0  # connection timeout in seconds; after it, tracking continues offline


@dataclass
class Mlflow(Service):
    """MLflow, with a tracking server or a SQLite file."""

    module: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"
    home: ClassVar[str] = "gangline_track.to_mlflow"

    # URI of the MLflow tracking server; null: MLFLOW_TRACKING_URI, else mlflow.db in the run directory
    uri: str | None = None

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
        lacks = [name for name in ("sqlalchemy", "alembic") if find_spec(name) is None]
        if not problems and uri.startswith("sqlite:") and lacks:
            what = f"track=mlflow needs {' and '.join(lacks)} to write a SQLite file (no tracking server is set)."
            problems.append(
                Problem(what, "", "pip install 'gangline-track[mlflow]'   or   track.mlflow.uri=http://...")
            )
        return problems


@dataclass
class Trackio(Service):
    """Trackio, with SQLite files on this machine, a Hugging Face Space, or a self-hosted server."""

    module: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"
    home: ClassVar[str] = "gangline_track.to_trackio"
    file_options: ClassVar[tuple[str, ...]] = ("path",)

    path: str | None = None  # directory of Trackio's SQLite files; null: TRACKIO_DIR, else Trackio's default
    space: str | None = None  # Hugging Face Space that stores the data, USER/NAME; null: no Space
    server: str | None = None  # URL of a self-hosted Trackio server; null: no server

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        if self.space and self.server:
            what = "track.trackio.space and track.trackio.server are mutually exclusive."
            problems.append(
                Problem(
                    what,
                    "Trackio sends a run to one destination.",
                    "track.trackio.space=null   or   track.trackio.server=null",
                )
            )
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
        summary="MLflow: a tracking server or a local SQLite file",
    ),
    Part(
        name="trackio",
        config=Trackio,
        build="gangline_track.background:build",
        summary="Trackio: local SQLite files, a Hugging Face Space or a server",
    ),
)
