"""Files of pulses in shared memory, named by the launcher, the run and the rank.

The pulse of a killed rank remains readable; the next start removes pulses of dead launchers. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

from gangline.launch.guard import read_birth, read_namespace

ROOT = Path("/dev/shm")
_OURS = re.compile(r"gangline-pulse-(?P<space>\d+)-(?P<pid>\d+)-(?P<born>\d+)-(?P<run>[0-9a-f]{12})-(?P<rank>\d+)")


def find_path(run_dir: str | Path, rank: int, owner: int) -> Path | None:
    """Return the path of the pulse of a rank of launcher process `owner`; None without shared memory or owner."""
    start = read_birth(owner)
    if start is None or not ROOT.is_dir():
        return None
    return ROOT / f"gangline-pulse-{read_namespace()}-{owner}-{start}-{_run(run_dir)}-{rank}"


def list_pulses(run_dir: str | Path) -> list[Path]:
    """Return the pulses of a run's ranks on this machine whose launcher is alive, in order of rank."""
    run = _run(run_dir)
    pulses = [(int(match["rank"]), file) for match, file in _list_files() if match["run"] == run and _is_alive(match)]
    return [file for _, file in sorted(pulses)]


def sweep() -> None:
    """Remove the pulses whose launcher is dead; keep all other pulses."""
    for match, file in _list_files():
        if not _is_alive(match):
            file.unlink(missing_ok=True)


def remove(owner: int) -> None:
    """Remove the pulses of all ranks of launcher process `owner`, which is about to end."""
    for match, file in _list_files():
        if int(match["pid"]) == owner and _is_alive(match):
            file.unlink(missing_ok=True)


def parse_owner(file: Path) -> int:
    """Return the launcher's process id from the path of a pulse. Raises ValueError for the path of another file."""
    match = _OURS.fullmatch(file.name)
    if match is None:
        raise ValueError(f"{file} is not a pulse file")
    return int(match["pid"])


def _list_files() -> list[tuple[re.Match[str], Path]]:
    files = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(ROOT):
            match = _OURS.fullmatch(entry.name)
            # A launcher in another pid namespace is not visible here.
            if match is None or int(match["space"]) != read_namespace():
                continue
            with contextlib.suppress(OSError):  # removed meanwhile
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    files.append((match, Path(entry.path)))
    return files


def _is_alive(match: re.Match[str]) -> bool:
    return read_birth(int(match["pid"])) == int(match["born"])


def _run(run_dir: str | Path) -> str:
    return hashlib.sha256(str(Path(run_dir).resolve()).encode()).hexdigest()[:12]
