"""Nodes that an order keeps away: which of them, until when, and never so many that too few are left. Torch-free.

Every node judges for itself, at each start and while it is away, from what all see alike: the orders in attempts.jsonl
and the names of the nodes that are heard of at the meeting. Those that were excluded first stay first where they are
needed, so that two nodes never leave for one another's sake.
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
    """Where the nodes of a job meet, as a node that may be excluded sees it."""

    def list_others(self) -> Collection[str]:
        """The names of the nodes that are heard of, without this one."""

    def mark_waiting(self) -> None:
        """This node would take part, and is out or between two starts: it is heard of by those that are out too."""

    def list_waiting(self) -> Collection[str]:
        """The names of the nodes that have said so lately."""

    def leave(self) -> None:
        """This node is no member of the start that ends."""

    def check_open(self) -> None:
        """Raises torch's RendezvousClosedError where the job is over."""


def list_excluded(run_dir: str | Path, hours: float | None, now: datetime | None = None) -> list[str]:
    """The nodes that an order keeps away now, longest first; it is over `hours` after the newest (None: never)."""
    since = None if hours is None else ((now or datetime.now(UTC)) - timedelta(hours=hours)).timestamp()
    orders: dict[str, bool] = {}
    for line in attempts.read(run_dir):
        for name in line.exclude:
            time = attempts.parse_time(line)
            orders[name] = since is None or time is None or time >= since
    return [name for name, holds in orders.items() if holds]


def stays_away(name: str, others: Collection[str], out: Sequence[str], fewest: int) -> bool:
    """Whether the node `name` keeps away, where `others` are heard of, `out` are excluded and `fewest` are needed."""
    if name not in out:
        return False
    lacking = fewest - len(set(others) - set(out))
    return name not in [one for one in out if one == name or one in others][: max(0, lacking)]


@dataclass
class Exclusion:
    """Of one node. `patience`: seconds in which a node that comes to a job's first start lets the others come first.

    machines: an order that excludes a node excludes every node of the same machine ("MACHINE/NUMBER").
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
        """Return as soon as this node may take part in a start; raises RendezvousClosedError where the job is over."""
        out = self._list_excluded()
        first, self.patience = time.monotonic() + self.patience, 0.0
        if out:  # it leaves one start before it joins the next, and is not to be missed meanwhile
            self.meeting.mark_waiting()
        if self.name not in out:
            return
        while time.monotonic() < first and not self._stays_away(out):
            time.sleep(LOOK_SECONDS)
        if not self._stays_away(out):
            self.say(f"train: {self.name} is excluded by an order; it stays, for too few other nodes are there")
            return
        self.meeting.leave()
        self.say(f"train: {self.name} is excluded by an order; others take its place, and it waits")
        while self._stays_away(self._list_excluded()):
            self.meeting.check_open()
            time.sleep(LOOK_SECONDS)
        why = "it is needed" if self.name in self._list_excluded() else "its exclusion is over"
        self.say(f"train: {self.name} was excluded by an order, and comes back: {why}")

    def _stays_away(self, out: Sequence[str]) -> bool:
        """Of several that wait no more come back than are needed, those first that were excluded first."""
        self.meeting.mark_waiting()
        others = {*self.meeting.list_others(), *self.meeting.list_waiting()} - {self.name}
        return stays_away(self.name, others, out, self.fewest)

    def _list_excluded(self) -> list[str]:
        """Return the names of the nodes that an order keeps away now, those that were excluded first before others."""
        out = list_excluded(self.run_dir, self.hours)
        if not self.machines or not out:
            return out
        names = {self.name, *self.meeting.list_others(), *self.meeting.list_waiting()}
        in_order = sorted(names, key=lambda name: (name in out, name))  # those that no order names stay before others
        return [name for one in dict.fromkeys(map(get_machine, out)) for name in in_order if get_machine(name) == one]
