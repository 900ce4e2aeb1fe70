"""Hang watcher: a process next to a machine's ranks that reads their pulses and reports the hung rank. Torch-free.

The watcher takes no part in collectives of the ranks, so it still works when a collective hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from gangline.health import Action, Verdict
from gangline.run.events import Events
from gangline.storage.files import lock_file, write_whole
from gangline_basics.launch.failures import RankFailure, claim
from gangline_health.hangs import flight, processes, summary
from gangline_health.hangs.config import HangsOptions
from gangline_health.hangs.diagnose import Diagnosis, Watched, diagnose
from gangline_health.hangs.limits import get_limit, learn_limits
from gangline_health.live.alerts import read_target, send
from gangline_health.live.target import name_target
from gangline_health.pulses import PulseReader, Seen, find

INTERVAL = 0.2  # seconds between two reads of the pulses
LEARN = 2.0  # seconds between two updates of the learned limits
STARVED = 0.2  # minimum share of a CPU core: with less, a runnable rank's time counts as CPU seconds / STARVED


@dataclass
class Standing:
    """Pulse of one rank, and the seconds since it last changed (`still`). A restarted rank has a new pulse."""

    reader: PulseReader
    pulse: Seen
    beat: int = -1
    still: float = 0.0
    state: str = ""
    cpu: float = 0.0

    def look(self, passed: float) -> None:
        """Update `still` after `passed` seconds; time in which the watcher or the rank got no CPU is not added."""
        beat = self.reader.read_beat()
        state, cpu = processes.read_state(self.pulse.pid)
        seconds = min(passed, 2 * INTERVAL)
        if state == "R":
            seconds = min(seconds, max(cpu - self.cpu, 0.0) / STARVED)
        self.still = self.still + seconds if beat == self.beat else 0.0
        self.beat, self.state, self.cpu = beat, state, cpu


@dataclass
class Watcher:
    """Watcher of the ranks of this machine, with their learned timeouts and the hangs that it has reported."""

    run_dir: Path
    options: HangsOptions
    alert: str = ""  # shell command or URL of alerts, "" for none
    host: str = field(default_factory=lambda: os.uname().nodename)
    machine: str = field(default_factory=summary.identify_machine)
    standing: dict[Path, Standing] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    learn_at: float = 0.0
    found: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)  # (generation, ranks) of reported hangs

    def look(self, passed: float) -> Diagnosis | None:
        """Read the pulse of every rank of this machine once; return the diagnosis of a hang, or None."""
        self._meet()
        for one in self.standing.values():
            one.look(passed)
        now = time.monotonic()
        if now >= self.learn_at:
            self.learn_at = now + LEARN
            self.known = learn_limits([one.reader.read() for one in self.standing.values()], self.options)
        if not any(one.still >= self.options.floor_seconds - 2 * INTERVAL for one in self.standing.values()):
            self.found.clear()  # every rank makes progress again: the next hang is a new hang
            if self._is_asked():
                summary.tell(self.run_dir, self.machine, self.list_ranks())
            return None
        return self.judge()

    def judge(self) -> Diagnosis | None:
        """Return the diagnosis of a hang from all known ranks, also of other machines; None if there is no hang."""
        own = self.list_ranks()
        if not any(one.overdue for one in own):
            return None
        world = max(one.pulse.world for one in own)
        if len(own) < world:
            summary.tell(self.run_dir, self.machine, own)
            generation = max(one.pulse.generation for one in own)
            others = [
                one for one in summary.read_summaries(self.run_dir, self.machine) if one.pulse.generation == generation
            ]
            own = sorted({one.rank: one for one in (*others, *own)}.values(), key=lambda one: one.rank)
        return diagnose(own)

    def list_ranks(self) -> list[Watched]:
        """Return the state of every rank of this machine, with the hang timeout of its present phase."""
        ranks = []
        for one in self.standing.values():
            pulse = one.reader.read()
            may = get_limit(pulse.phase, self.known, self.options)
            if one.state == "T":
                may = min(may, self.options.floor_seconds)
            # the timeout is shortened by the possible delay of a read of the pulse
            ranks.append(Watched(pulse, one.still, max(may - 2 * INTERVAL, INTERVAL), one.state, self.host))
        return sorted(ranks, key=lambda one: one.rank)

    def _is_asked(self) -> bool:
        """Return whether another machine requests a summary of this machine's ranks."""
        own = summary.get_summary_path(self.run_dir, self.machine)
        with contextlib.suppress(OSError):
            theirs = [file.stat().st_mtime for file in own.parent.glob("pulse-*.json") if file != own]
            own_time = own.stat().st_mtime if own.exists() else 0.0
            return any(time.time() - each < summary.FRESH_SECONDS and each > own_time for each in theirs)
        return False

    def _meet(self) -> None:
        """Update `standing`: open the pulses of new or restarted ranks, close the pulses of ended ranks."""
        there = find(self.run_dir)
        for file, one in list(self.standing.items()):
            if file not in there or not one.reader.is_current():
                one.reader.close()
                del self.standing[file]
                self.known, self.learn_at = {}, 0.0
        for file in there:
            if file not in self.standing:
                with contextlib.suppress(OSError, ValueError):
                    reader = PulseReader(file)
                    self.standing[file] = Standing(reader, reader.read())

    # --- acting -------------------------------------------------------------------------------------------------------

    def act(self, diagnosis: Diagnosis) -> None:
        """Report a hang once, and kill the hung rank if `options.act` is restart: then the launcher restarts the ranks.

        The rank is killed even if the report fails; an alert delays the kill at most by the timeout of `send`.
        """
        own = self.list_ranks()
        culprits = [one for one in own if one.rank in diagnosis.ranks]
        generation = max(one.pulse.generation for one in own)
        if (generation, diagnosis.ranks) in self.found:
            return
        self.found.add((generation, diagnosis.ranks))
        if not culprits:
            return  # the watcher on the machine of the hung rank reports the hang
        try:
            self._tell(diagnosis, own, culprits)
        except Exception as error:  # such as an OSError on a full disk
            print(
                f"health: {diagnosis.evidence}; the report could not be written: {type(error).__name__}: {error}",
                flush=True,
            )
        if self.options.act == "restart":
            evidence = f"hang: {diagnosis.evidence}; the rank was killed"
            # a stop signal or a network failure may hit any code, so the callback or check that runs is not to blame
            member = culprits[0].pulse.member if diagnosis.why not in ("stopped", "transfer") else ""
            failure = RankFailure(diagnosis.ranks[0], "bug", 1, evidence, member=member)
            claim(self.run_dir / "logs", generation, failure)
            for one in culprits if diagnosis.why != "transfer" else culprits[:1]:
                processes.kill(one.pulse, signal.SIGKILL)

    def _tell(self, diagnosis: Diagnosis, own: list[Watched], culprits: list[Watched]) -> None:
        """Write a verdict to events.jsonl and a report with stack traces to logs/hang-*.json, and send the alert."""
        generation = max(one.pulse.generation for one in own)
        place = self.run_dir / "logs" / f"hang-{generation}-rank-{diagnosis.ranks[0]:05d}.json"
        where = ", ".join(f"rank {rank}" for rank in diagnosis.ranks)
        evidence = f"{diagnosis.evidence}; stack traces: {place}"
        action = Action.RESTART if self.options.act == "restart" else Action.WARN
        details = {"ranks": diagnosis.ranks, "why": diagnosis.why, "operation": diagnosis.operation, "host": self.host}
        verdict = Verdict("hang", where, 1.0, evidence, action, details=details)
        events = Events(self.run_dir, generation, by="watcher")
        events.write("verdict", step=culprits[0].pulse.step, **verdict.to_dict())
        events.close()
        stacks = processes.collect_stacks(self.run_dir, [one.pulse for one in own])
        flights = [path.name for path in flight.collect(self.run_dir, [one.pulse for one in own])]
        write_whole(place, json.dumps({**build_report(diagnosis, own, stacks), "flight_recorder": flights}, indent=1))
        print(f"health: {verdict}", flush=True)
        if self.alert and (why := send(self.alert, {"run_dir": str(self.run_dir), **verdict.to_dict()})):
            print(f"health.monitors.alert ({name_target(self.alert)}) failed: {why}", flush=True)


def build_report(diagnosis: Diagnosis, ranks: list[Watched], stacks: dict[int, str]) -> dict:
    """Return the report of a hang for a JSON file: diagnosis, and state, collectives and stack traces of each rank."""
    return {
        "ranks": diagnosis.ranks,
        "why": diagnosis.why,
        "operation": diagnosis.operation,
        "evidence": diagnosis.evidence,
        "of_each_rank": {
            one.rank: {
                "pid": one.pulse.pid,
                "host": one.host,
                "state": one.state,
                "step": one.pulse.step,
                "phase": one.pulse.phase,
                "under": one.pulse.under,
                "member": one.pulse.member,
                "still_seconds": one.still,
                "limit_seconds": min(one.limit, 1e9),
                "collectives": [
                    f"{each.axis}: {each.operation} {each.sequence}, {each.bytes} bytes, "
                    + ("done" if each.done else "not waited for")
                    for each in one.pulse.recent[-8:]
                ],
                "stacks": stacks.get(one.rank, "").splitlines(),
            }
            for one in ranks
        },
    }


def lock_watch(run_dir: Path, machine: str) -> contextlib.AbstractContextManager[None]:
    """Return a lock that lets one watcher per machine and run work at a time; watchers of other agents wait for it.

    If the file system supports no locks, the watchers of all agents work at once, and each reports the hangs it finds.
    """
    return lock_file(run_dir / "logs" / f"watch-{machine}.lock", required=False, mode=0o666)


def main(run_dir: str, options: dict) -> None:
    """Run the hang watcher as a sidecar."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    watcher = Watcher(Path(run_dir), HangsOptions(**options), read_target(run_dir))
    with lock_watch(watcher.run_dir, watcher.machine):
        last = time.monotonic()
        while True:
            time.sleep(INTERVAL)
            now = time.monotonic()
            diagnosis = watcher.look(now - last)
            last = now
            if diagnosis is not None:
                watcher.act(diagnosis)
