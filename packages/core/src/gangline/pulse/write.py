"""Writer of a rank's pulse, a shared-memory record of its phase and collectives; a write takes a few hundred ns."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns

from gangline.launch.guard import read_birth
from gangline.pulse import layout, memory
from gangline.pulse.layout import BEAT, GROUPS, HISTOGRAMS, NUMBER, PHASE, PHASES, RECORD, ROW, SINCE, SPENT, UNDER

WARM_UP = 3  # number of first steps of a start that the histograms leave out
_COLLECTIVE, _BETWEEN = NUMBER["collective"], NUMBER["between"]
_ROW_OF = [layout.ROWS.index(name if name in layout.ROWS else "other") for name in PHASES]


class Pulse:
    """Words that the rank writes and watchers read (`gangline.pulse.layout`). Only one thread at a time may write.

    Without a buffer the words are private memory of this process, so a rank without a watcher runs the same code.
    """

    def __init__(
        self, buffer: mmap.mmap | bytearray | None = None, rank: int = 0, world: int = 1, generation: int = 0
    ) -> None:
        self._words = memoryview(bytearray(8 * layout.WORDS) if buffer is None else buffer).cast("B").cast("q")
        self._beat, self._phase, self._since = 0, NUMBER["start"], monotonic_ns()
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._row = 0
        self._member = ""
        self._told = [0] * len(PHASES)
        self._first: int | None = None
        self._warm = False
        words = self._words
        words[PHASE], words[SINCE] = self._phase, self._since
        words[layout.PID], words[layout.BORN] = os.getpid(), read_birth(os.getpid()) or 0
        words[layout.RANK], words[layout.WORLD], words[layout.GENERATION] = rank, world, generation
        words[layout.VERSION] = layout.MAGIC  # written last: readers ignore a pulse without this word

    @classmethod
    def open(cls, run_dir: str | Path, rank: int, world: int, generation: int, owner: int) -> Pulse:
        """Open a pulse in shared memory for watchers; in private memory if shared memory is missing or full.

        owner: process that starts and watches the ranks of this machine; the pulse is removed when it ends.
        """
        file = memory.find_path(run_dir, rank, owner)
        buffer = None if file is None else _map_file(file)
        return cls(buffer, rank, world, generation)

    @property
    def number(self) -> int:
        """Number of the rank's current phase."""
        return self._phase

    @property
    def generation(self) -> int:
        """Number of the start of the run's ranks (`gangline.run.generation`)."""
        return int(self._words[layout.GENERATION])

    def enter(self, phase: int) -> int:
        """Enter the phase with number `phase`; return the number of the previous phase."""
        now, before, words = monotonic_ns(), self._phase, self._words
        duration, place = now - self._since, SPENT + 2 * before
        self._beat += 2
        words[BEAT] = self._beat - 1
        words[place] += duration
        words[place + 1] += 1
        if self._warm:
            words[HISTOGRAMS + layout.COLUMNS * before + layout.find_column(duration)] += 1
        words[PHASE] = phase
        words[SINCE] = now
        words[BEAT] = self._beat
        self._phase, self._since = phase, now
        return before

    @contextmanager
    def enter_phase(self, name: str) -> Iterator[None]:
        """Enter the phase `name` for the block; a name that is not in `PHASES` has no effect."""
        number = NUMBER.get(name)
        before = self._phase if number is None else self.enter(number)
        try:
            yield
        finally:
            if number is not None:
                self.enter(before)

    def step(self, number: int) -> None:
        """Record that step `number` begins."""
        if self._first is None:
            self._first = number
        self._warm = not 0 <= number - self._first < WARM_UP
        self._words[layout.STEP] = number
        self.enter(_BETWEEN)

    def call(self, member: str) -> str:
        """Record the callback or health check that core calls now, "" for none; return the previous value."""
        before, self._member = self._member, member
        text = member.encode()[: layout.MEMBER_BYTES].ljust(layout.MEMBER_BYTES, b"\0")
        self._words.cast("B")[8 * layout.MEMBER : 8 * layout.WORDS] = text
        return before

    def take_rows(self) -> list[float]:
        """Return the seconds in each row of `ROWS` since the last call, including the current phase so far."""
        self.enter(self._phase)
        durations = self._words[SPENT : SPENT + 2 * len(PHASES) : 2].tolist()
        seconds = [0.0] * len(layout.ROWS)
        for row, now, baseline in zip(_ROW_OF, durations, self._told, strict=True):
            seconds[row] += (now - baseline) * 1e-9
        self._told = durations
        return seconds

    # --- collectives -------------------------------------------------------------------------------------------------

    def group(self, axis: str, ranks: Sequence[int]) -> int:
        """Return the number of a process group; groups beyond `MOST_GROUPS` share the last number."""
        key = axis, tuple(ranks)
        if key not in self._groups:
            number = self._groups[key] = min(len(self._groups), layout.MOST_GROUPS - 1)
            line = f"{number} {axis} {_format_ranks(ranks)}\n".encode()
            start = self._words[layout.NAMED]
            if start + len(line) <= layout.NAME_BYTES:
                place = 8 * layout.NAMES + start
                self._words.cast("B")[place : place + len(line)] = line
                self._words[layout.NAMED] = start + len(line)
        return self._groups[key]

    def begin(self, group: int, operation: int, size: int, peers: int = 0) -> int:
        """Begin a collective or a point-to-point transfer; return its row. peers: bit mask of awaited ranks, or 0."""
        number, words = self._row, self._words
        self._row = number + 1
        sequence = words[GROUPS + group]
        if not peers:  # a point-to-point transfer has no sequence number
            sequence += 1
            words[GROUPS + group] = sequence
        place = RECORD + layout.ROW_WORDS * (number % layout.RECORDS)
        words[place] = group * 16 + operation
        words[place + 1] = sequence
        words[place + 2] = monotonic_ns()
        words[place + 3] = size
        words[place + 4] = peers
        words[place + 5] = 0
        words[layout.RECORDED] = self._row
        return number

    def wait(self, row: int) -> int:
        """Enter the wait for the collective in row `row`; return the previous phase, for `finish`."""
        words = self._words
        words[ROW] = row + 1
        words[UNDER] = self._phase
        return self.enter(_COLLECTIVE)

    def finish(self, row: int, phase: int, finished: bool = True) -> None:
        """Leave the wait and enter `phase`. finished: whether the collective is done, and its row gets the end time."""
        self.enter(phase)
        self._words[ROW] = 0
        if finished and self._row - row <= layout.RECORDS:
            self._words[RECORD + layout.ROW_WORDS * (row % layout.RECORDS) + layout.DONE] = self._since


def _map_file(file: Path) -> mmap.mmap | None:
    """Create a file of zeros in shared memory and map it; return None if shared memory is full."""
    size = 8 * layout.WORDS
    fresh = file.with_name(f"{file.name}.new")  # renamed later, so that no reader sees a partial file
    with contextlib.suppress(OSError):
        fresh.unlink(missing_ok=True)
        handle = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)  # without it a write to a full file system would kill the process
            buffer = mmap.mmap(handle, size)
            fresh.rename(file)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        return buffer
    return None


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: a range "0:8:2" (start:stop:step) or a list, shortened to "0,..." if it is long."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1, step) if step > 0 else ()):
        return f"{ranks[0]}:{ranks[-1] + 1}:{step}"
    line = ",".join(map(str, ranks))
    return line if len(line) < 2000 else f"{ranks[0]},..."


_current = Pulse()


def get_current() -> Pulse:
    """Return the pulse of this process."""
    return _current


def use(pulse: Pulse) -> None:
    """Set the pulse of this process, which `forward_context.frame`, the training loop and Comm use."""
    global _current
    _current = pulse
