"""Id of this run at a service, in RUN_DIR/track/SERVICE.json, so that a start continues the run there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gangline.storage.files import read_regular, write_whole


class RunId:
    """Id of the run at one place of a service; at another place it has another id."""

    def __init__(self, run_dir: str | Path, service: str, place: str) -> None:
        self.path, self.place = Path(run_dir) / "track" / f"{service}.json", redact_secrets(place)

    def read(self) -> str | None:
        """Return the id; None if the run has not been there, or if the file is damaged."""
        try:
            content = json.loads(read_regular(self.path))
            name, place = str(content["id"]), content["place"]
            if redact_secrets(place) != self.place:
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if place != self.place:  # an earlier version wrote the complete address
            self.write(name)
        return name

    def write(self, name: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps({"id": name, "place": self.place}) + "\n")


def redact_secrets(place: str) -> str:
    """Return a place without the user, password and query of its URL, where services have their secrets."""
    return re.sub(r"(://)[^/\s@]*@|\?\S*", r"\1", place)
