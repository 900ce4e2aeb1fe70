"""Local data files that changed since the ranks were started, the most common cause of a SIGBUS. Torch-free."""

from __future__ import annotations

import glob
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from gangline.run.events import read_events

SECONDS = 3.0  # timeout of the search in seconds: a corpus may have millions of files, and a file system may hang
NAMED = 3  # maximum number of files in a message
CACHE = "cache"  # option for a cache folder, which many runs write to while they read from it


def describe_changed_data(run_dir: Path) -> str:
    """Return a line that lists the data files that changed since the newest launch, or says that no file did.

    Returns "" if the answer is unknown: the data is not in local files, or the search takes longer than SECONDS.
    """
    lines: list[str] = []
    stop = time.monotonic() + SECONDS
    search = threading.Thread(target=lambda: lines.append(_search(run_dir, stop)), daemon=True)
    search.start()
    search.join(SECONDS)
    return lines[0] if lines else ""


def _search(run_dir: Path, stop: float) -> str:
    try:
        launches = [line["time"] for line in read_events(run_dir) if line.get("event") == "launch"]
        since = datetime.fromisoformat(launches[-1]).timestamp()
        paths = _list_local_paths(run_dir)
    except Exception:  # the report of a failure must not fail
        return ""
    looked, changed_files = 0, []
    for path in _iterate_files(paths):
        if time.monotonic() > stop:
            break
        with suppress(OSError):
            about = os.stat(path)
            looked += 1
            if max(about.st_mtime, about.st_ctime) > since:  # ctime cannot be set back
                changed_files.append(f"{path} ({about.st_size} bytes now)")
    else:
        if looked and not changed_files:
            return "No file of the run's data has changed since the start."
    more = f" and {len(changed_files) - NAMED} more" if len(changed_files) > NAMED else ""
    return f"Data files that changed since the start: {', '.join(changed_files[:NAMED])}{more}" if changed_files else ""


def _list_local_paths(run_dir: Path) -> list[str]:
    """Return the local files and folders in the options of the data and of the validation sets."""
    from gangline.config.validation import read_sets
    from gangline.run.directory import RunDirectory

    run = RunDirectory.open(run_dir).run()
    texts: dict[str, None] = {}
    for config in (run.data, *read_sets(run)[0].values()):
        for name in config.file_options:
            if name != CACHE:
                texts.update(dict.fromkeys(_list_texts(getattr(config, name, None))))
    return [os.path.expanduser(text) for text in texts if text and "://" not in text]


def _list_texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items: Iterable[Any] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _list_texts(item)]


def _iterate_files(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        for there in [path] if os.path.exists(path) else glob.glob(path, recursive=True):
            if not os.path.isdir(there):
                yield there
            for folder, folders, files in os.walk(there):
                folders.sort()
                yield from (os.path.join(folder, file) for file in sorted(files))
