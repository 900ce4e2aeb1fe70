"""Reader of the pulses of ranks from another process, also if a rank was stopped or killed. Torch-free."""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gangline.launch.guard import read_birth
from gangline.pulse import layout
from gangline.pulse.layout import OPERATIONS, PHASES
from gangline.pulse.memory import list_pulses, parse_owner

TRIES = 10_000  # maximum number of reads to get a consistent head


@dataclass(frozen=True)
class Collective:
    """Collective, or exchange between some ranks, in the pulse of a rank.

    sequence  number of collectives of the group that the rank had begun, this collective included; for an exchange,
              the number of collectives begun before it
    peers     of an exchange: indices of the other ranks along the axis; empty: unknown
    """

    axis: str
    ranks: tuple[int, ...] | None  # ranks of the group; None: too many to store
    operation: str
    sequence: int
    bytes: int
    began: float  # begin, in seconds on the machine's monotonic clock
    done: float  # end, in seconds on the same clock; 0: not finished, or not yet waited for
    peers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Seen:
    """Snapshot of the pulse of a rank. Times are seconds on the machine's monotonic clock."""

    rank: int
    world: int
    generation: int
    pid: int
    alive: bool  # True while the process that wrote the pulse exists
    beat: int  # counter that changes with every phase and collective
    step: int  # current step
    phase: str
    under: str  # while the rank waits in a collective: the phase that contains the wait
    since: float
    waits: Collective | None  # collective in which the rank waits; None: it does not wait
    begun: dict[tuple[str, tuple[int, ...] | None], int] = field(default_factory=dict)  # group -> collectives begun
    recent: tuple[Collective, ...] = ()  # newest collectives, oldest first
    spent: dict[str, float] = field(default_factory=dict)  # phase -> seconds since the start
    lasted: dict[str, list[int]] = field(default_factory=dict)  # phase -> durations, see `layout.find_column`
    member: str = ""  # callback or health check that is running, such as "health/monitors"; "": none


class PulseReader:
    """Memory-mapped pulse of one rank. Raises OSError if the file is missing, ValueError if it has another layout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.inode = os.fstat(file.fileno()).st_ino
            self._memory = mmap.mmap(file.fileno(), 8 * layout.WORDS, prot=mmap.PROT_READ)
        self._words = memoryview(self._memory).cast("q")
        if self._words[layout.VERSION] != layout.MAGIC:
            raise ValueError(f"{path} is not a pulse file of this version")

    @property
    def owner(self) -> int:
        """Process id of the launcher that started the rank and monitors it."""
        return parse_owner(self.path)

    def is_current(self) -> bool:
        """Return whether the path is still the mapped file: a restarted rank creates a new file."""
        try:
            return self.path.stat().st_ino == self.inode
        except OSError:
            return False

    def read_beat(self) -> int:
        """Return the beat, a counter that changes with every phase and every collective."""
        return self._words[layout.BEAT]

    def read(self) -> Seen:
        """Return a consistent snapshot of the pulse."""
        words, row = self._words, [0] * layout.ROW_WORDS
        for _ in range(TRIES):  # until the head and its row are consistent; all other words only grow
            head = words[: layout.HEAD].tolist()
            if head[layout.ROW]:
                start = layout.RECORD + layout.ROW_WORDS * ((head[layout.ROW] - 1) % layout.RECORDS)
                row = words[start : start + layout.ROW_WORDS].tolist()
            if head[layout.BEAT] % 2 == 0 and words[layout.BEAT] == head[layout.BEAT]:
                break
        snapshot = head + words[layout.HEAD : layout.NAMES].tolist()
        names = bytes(words.cast("B")[8 * layout.NAMES : 8 * layout.NAMES + snapshot[layout.NAMED]])
        groups = _parse_groups(names.decode(errors="replace"))
        member = bytes(words.cast("B")[8 * layout.MEMBER : 8 * layout.WORDS]).rstrip(b"\0")
        rows = range(max(0, snapshot[layout.RECORDED] - layout.RECORDS), snapshot[layout.RECORDED])
        recent = [_parse_collective(_get_row(snapshot, number), groups) for number in rows]
        pid = snapshot[layout.PID]
        return Seen(
            rank=snapshot[layout.RANK],
            world=snapshot[layout.WORLD],
            generation=snapshot[layout.GENERATION],
            pid=pid,
            alive=read_birth(pid) == snapshot[layout.BORN],
            beat=snapshot[layout.BEAT],
            step=snapshot[layout.STEP],
            phase=PHASES[snapshot[layout.PHASE]],
            under=PHASES[snapshot[layout.UNDER]],
            since=snapshot[layout.SINCE] * 1e-9,
            waits=_parse_collective(row, groups) if snapshot[layout.ROW] else None,
            begun={group: snapshot[layout.GROUPS + number] for number, group in groups.items()},
            recent=tuple(recent),
            spent={name: snapshot[layout.SPENT + 2 * number] * 1e-9 for number, name in enumerate(PHASES)},
            lasted={name: _get_histogram(snapshot, number) for number, name in enumerate(PHASES)},
            member=member.decode(errors="replace"),
        )

    def close(self) -> None:
        """Release the mapped memory."""
        self._words.release()
        self._memory.close()


def find(run_dir: str | Path) -> list[Path]:
    """Return the pulse files of the newest start of a run on this machine, sorted by rank.

    Pulses of a dead launcher are left out, because a caller would wait for dead processes. So are pulses of earlier
    starts, which remain if the run now has fewer ranks on this machine.
    """
    started = {file: _read_generation(file) for file in list_pulses(run_dir)}
    newest = max(started.values(), default=0)
    return [file for file, generation in started.items() if generation == newest]


def open_readers(run_dir: str | Path) -> list[PulseReader]:
    """Return a reader of each pulse that `find` returns, without pulses that are incomplete or were just removed."""
    readers = []
    for path in find(run_dir):
        with suppress(OSError, ValueError):
            readers.append(PulseReader(path))
    return readers


def _read_generation(file: Path) -> int:
    """Return the generation (start of the ranks) of a pulse; -1 if its file is missing or incomplete."""
    with suppress(OSError), file.open("rb", buffering=0) as stream:
        words = os.pread(stream.fileno(), 8, 8 * layout.GENERATION)
        if len(words) == 8:
            return int.from_bytes(words, sys.byteorder)
    return -1


def _get_histogram(held: list[int], phase: int) -> list[int]:
    start = layout.HISTOGRAMS + layout.COLUMNS * phase
    return held[start : start + layout.COLUMNS]


def _parse_groups(names: str) -> dict[int, tuple[str, tuple[int, ...] | None]]:
    groups: dict[int, tuple[str, tuple[int, ...] | None]] = {}
    for line in names.splitlines():
        number, axis, ranks = line.split(" ")
        groups[int(number)] = axis, _parse_ranks(ranks)
    return groups


def _parse_ranks(short: str) -> tuple[int, ...] | None:
    if short.endswith("..."):
        return None
    if ":" in short:
        return tuple(range(*map(int, short.split(":"))))
    return tuple(map(int, short.split(",")))


def _get_row(held: list[int], number: int) -> list[int]:
    start = layout.RECORD + layout.ROW_WORDS * (number % layout.RECORDS)
    return held[start : start + layout.ROW_WORDS]


def _parse_collective(row: list[int], groups: dict[int, tuple[str, tuple[int, ...] | None]]) -> Collective:
    code, sequence, began, size, peers, end = row
    axis, ranks = groups.get(code // 16, ("?", None))
    return Collective(
        axis,
        ranks,
        OPERATIONS[code % 16],
        sequence,
        size,
        began * 1e-9,
        end * 1e-9,
        tuple(bit for bit in range(layout.MOST_PEERS) if peers >> bit & 1),
    )
