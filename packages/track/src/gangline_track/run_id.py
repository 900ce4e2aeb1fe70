"""Id of a run at a tracking service, stored in RUN_DIR/track/SERVICE.json, so that each start continues the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gangline.storage.files import read_regular, write_whole


class RunId:
    """Stored id of a run at a service. place: server address and project; an id is valid only there."""

    def __init__(self, run_dir: str | Path, service: str, place: str) -> None:
        self.path, self.place = Path(run_dir) / "track" / f"{service}.json", redact_secrets(place)

    def read(self) -> str | None:
        """Return the stored id, or None if the file is missing, damaged or of another place."""
        try:
            content = json.loads(read_regular(self.path))
            name, place = str(content["id"]), content["place"]
            if redact_secrets(place) != self.place:
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if place != self.place:  # an earlier version of gangline stored the URL with its secrets, so overwrite the file
            self.write(name)
        return name

    def write(self, name: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps({"id": name, "place": self.place}) + "\n")


def redact_secrets(place: str) -> str:
    """Return a place without the user, password and query of its URL, which may be secret."""
    return re.sub(r"(://)[^/\s@]*@|\?\S*", r"\1", place)
