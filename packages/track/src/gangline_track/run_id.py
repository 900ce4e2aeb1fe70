"""RUN_DIR/track/SERVICE.json: which run at the service this run directory is, so that a start goes on with it."""

from __future__ import annotations

import json
from pathlib import Path

from gangline.tools import write_whole


class RunId:
    """The name of the run at a place of a service; at another place it has another."""

    def __init__(self, run_dir: str | Path, service: str, place: str) -> None:
        self.path, self.place = Path(run_dir) / "track" / f"{service}.json", place

    def read(self) -> str | None:
        """None where the run has not been there; a file that somebody spoilt says nothing."""
        try:
            content = json.loads(self.path.read_text())
            return str(content["id"]) if content["place"] == self.place else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, name: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps({"id": name, "place": self.place}) + "\n")
