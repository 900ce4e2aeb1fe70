"""Summaries of ranks, exchanged between machines: one file per machine in the run directory, written on request.

When one of its ranks is overdue, a machine writes its summary; that requests the summaries of all other machines.
Torch-free.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gangline.storage.files import open_own, read_regular
from gangline_health.hangs.diagnose import Watched
from gangline_health.pulses import Collective, Seen

FRESH_SECONDS = 10.0  # maximum age of a summary; an older one is ignored


@functools.cache
def identify_machine() -> str:
    """Return 12 hex digits that identify the host name, the boot, the pid namespace and the shared-memory mount.

    The host name alone is not enough: containers and cloned machines share it. Two watchers read the same pulses if
    they have the same pid namespace and the same shared memory.
    """
    identifiers = [os.uname().nodename]
    for what in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
        lambda: str(Path("/dev/shm").stat().st_dev),
    ):
        with contextlib.suppress(OSError):
            identifiers.append(what())
    return hashlib.sha256(" ".join(identifiers).encode()).hexdigest()[:12]


def get_summary_path(run_dir: Path, machine: str) -> Path:
    return run_dir / "logs" / f"pulse-{machine}.json"


def tell(run_dir: Path, machine: str, ranks: list[Watched]) -> None:
    """Write the summary of this machine, `ranks`, and replace its file atomically."""
    file = get_summary_path(run_dir, machine)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    with open_own(draft, "w") as stream:
        stream.write(json.dumps({"time": time.time(), "ranks": [_encode_watched(one) for one in ranks]}))
    draft.replace(file)


def read_summaries(run_dir: Path, machine: str) -> list[Watched]:
    """Return the ranks in the summaries of other machines that are younger than `FRESH_SECONDS`."""
    ranks: list[Watched] = []
    for file in sorted((run_dir / "logs").glob("pulse-*.json")):
        if file == get_summary_path(run_dir, machine):
            continue
        try:
            content = json.loads(read_regular(file))
        except (OSError, ValueError):
            continue
        if time.time() - content["time"] < FRESH_SECONDS:
            ranks += [_parse_watched(each) for each in content["ranks"]]
    return ranks


def _encode_watched(one: Watched) -> dict[str, Any]:
    content = asdict(one)
    pulse = content["pulse"]
    pulse["begun"] = [[axis, ranks, count] for (axis, ranks), count in one.pulse.begun.items()]
    pulse["lasted"], pulse["spent"] = {}, {}
    content["limit"] = min(one.limit, 1e9)
    return content


def _parse_watched(content: dict[str, Any]) -> Watched:
    pulse = content["pulse"]
    pulse["begun"] = {(axis, _parse_ranks(ranks)): count for axis, ranks, count in pulse["begun"]}
    pulse["recent"] = tuple(_parse_collective(each) for each in pulse["recent"])
    pulse["waits"] = _parse_collective(pulse["waits"]) if pulse["waits"] else None
    return Watched(**{**content, "pulse": Seen(**pulse)})


def _parse_collective(content: dict[str, Any]) -> Collective:
    return Collective(**{**content, "ranks": _parse_ranks(content["ranks"]), "peers": tuple(content["peers"])})


def _parse_ranks(ranks: list[int] | None) -> tuple[int, ...] | None:
    return None if ranks is None else tuple(ranks)
