"""Exclusion of nodes by health checks: which nodes stay out of a job, and until when. Torch-free.

The minimum number of nodes for a start always remains. Every node decides for itself, at each start and while it is
excluded, from data that all nodes share: the exclusions in attempts.jsonl and the names of the live nodes at the
rendezvous. If excluded nodes are needed, they take part in order of exclusion, so all nodes decide alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from gangline.run import attempts
from gangline_basics.launch.nodes import get_machine

LOOK_SECONDS = 0.5


class Meeting(Protocol):
    """Rendezvous of the nodes of a job, as used by a node that may be excluded."""

    def list_others(self) -> Collection[str]:
        """Return the names of the live nodes except this node."""

    def mark_waiting(self) -> None:
        """Announce to all nodes that this node is live and can take part, although it is in no start now."""

    def list_waiting(self) -> Collection[str]:
        """Return the names of the nodes that called `mark_waiting` recently."""

    def leave(self) -> None:
        """Leave the rendezvous of the start that has ended."""

    def check_open(self) -> None:
        """Raise torch's RendezvousClosedError if the job is over."""


def list_excluded(run_dir: str | Path, hours: float | None, now: datetime | None = None) -> list[str]:
    """Return the excluded nodes in order of exclusion. A node is excluded until `hours` after its newest exclusion."""
    since = None if hours is None else ((now or datetime.now(UTC)) - timedelta(hours=hours)).timestamp()
    holds: dict[str, bool] = {}
    for line in attempts.read(run_dir):
        for name in line.exclude:
            time = attempts.parse_time(line)
            holds[name] = since is None or time is None or time >= since
    return [name for name, excluded in holds.items() if excluded]


def stays_away(name: str, others: Collection[str], out: Sequence[str], fewest: int) -> bool:
    """Return whether the excluded node `name` stays away.

    others  names of the live nodes
    out     names of the excluded nodes, the first excluded first
    fewest  minimum number of nodes of a start
    """
    if name not in out:
        return False
    lacking = fewest - len(set(others) - set(out))
    return name not in [one for one in out if one == name or one in others][: max(0, lacking)]


@dataclass
class Exclusion:
    """Exclusion of one node.

    patience  time in seconds for which an excluded node at a job's first start waits for others before it takes part
    machines  whether the exclusion of a node excludes every node of the same machine ("MACHINE/NUMBER")
    """

    name: str
    run_dir: Path
    meeting: Meeting
    fewest: int
    hours: float | None
    patience: float
    say: Callable[[str], None]
    machines: bool = False

    def wait(self) -> None:
        """Return as soon as this node may take part in a start. Raises RendezvousClosedError if the job is over."""
        out = self._list_excluded()
        first, self.patience = time.monotonic() + self.patience, 0.0
        if out:  # between two starts this node has no heartbeat, and other nodes must not count it as lost
            self.meeting.mark_waiting()
        if self.name not in out:
            return
        while time.monotonic() < first and not self._stays_away(out):
            time.sleep(LOOK_SECONDS)
        if not self._stays_away(out):
            self.say(
                f"train: node {self.name} is excluded by a health check, but takes part: too few other nodes are live"
            )
            return
        self.meeting.leave()
        self.say(f"train: node {self.name} is excluded by a health check: waiting while other nodes train")
        while self._stays_away(self._list_excluded()):
            self.meeting.check_open()
            time.sleep(LOOK_SECONDS)
        why = "too few other nodes are live" if self.name in self._list_excluded() else "the exclusion has ended"
        self.say(f"train: node {self.name} was excluded by a health check, and takes part again: {why}")

    def _stays_away(self, out: Sequence[str]) -> bool:
        """Return whether this node stays away now: only as many nodes return as needed, in order of exclusion."""
        self.meeting.mark_waiting()
        others = {*self.meeting.list_others(), *self.meeting.list_waiting()} - {self.name}
        return stays_away(self.name, others, out, self.fewest)

    def _list_excluded(self) -> list[str]:
        """Return the names of the nodes that are excluded now, the first excluded first."""
        out = list_excluded(self.run_dir, self.hours)
        if not self.machines or not out:
            return out
        names = {self.name, *self.meeting.list_others(), *self.meeting.list_waiting()}
        # nodes of an excluded machine that were not excluded by name come first
        in_order = sorted(names, key=lambda name: (name in out, name))
        return [name for one in dict.fromkeys(map(get_machine, out)) for name in in_order if get_machine(name) == one]
