"""RUN_DIR/track/SERVICE.json: which run at the service this run directory is, so that a start goes on with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gangline.storage.files import read_regular, write_whole


class RunId:
    """The name of the run at a place of a service; at another place it has another."""

    def __init__(self, run_dir: str | Path, service: str, place: str) -> None:
        self.path, self.place = Path(run_dir) / "track" / f"{service}.json", redact_secrets(place)

    def read(self) -> str | None:
        """None where the run has not been there; a file that somebody spoilt says nothing."""
        try:
            content = json.loads(read_regular(self.path))
            name, place = str(content["id"]), content["place"]
            if redact_secrets(place) != self.place:
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if place != self.place:  # an earlier version wrote the whole address
            self.write(name)
        return name

    def write(self, name: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps({"id": name, "place": self.place}) + "\n")


def redact_secrets(place: str) -> str:
    """A place without the user, the password and the query of its URL, where services have their secrets."""
    return re.sub(r"(://)[^/\s@]*@|\?\S*", r"\1", place)
