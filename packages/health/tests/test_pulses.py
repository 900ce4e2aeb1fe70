"""Pulse reader: atomic reads, the newest generation only, and pulses of dead ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from gangline.comm.pulsed import Pulsed
from gangline.launch import guard
from gangline.mesh import Mesh
from gangline.pulse import layout
from gangline.pulse.layout import PHASES
from gangline.pulse.memory import remove, sweep
from gangline.pulse.write import Pulse, use
from gangline_health.pulses import PulseReader, find, open_readers
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

# Code of a rank that kills itself in its backward pass, in a collective of a group of four ranks.
RANK = """
import os, signal, sys
from gangline.pulse.write import Pulse
pulse = Pulse.open(sys.argv[1], rank=3, world=8, generation=2, owner=int(sys.argv[2]))
group = pulse.group("tp", (0, 1, 2, 3))
for step in range(1, 7):
    pulse.step(step)
    with pulse.enter_phase("backward"):
        row = pulse.begin(group, 1, 4096)
        before = pulse.wait(row)
        if step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        pulse.finish(row, before)
"""


def test_killed_rank_pulse_shows_its_last_position(tmp_path):
    subprocess.run([sys.executable, "-c", RANK, str(tmp_path), str(os.getpid())])
    try:
        (path,) = find(tmp_path)
        reader = PulseReader(path)
        seen = reader.read()
        assert reader.owner == os.getpid()
        assert (seen.rank, seen.world, seen.generation, seen.alive) == (3, 8, 2, False)
        assert (seen.step, seen.phase, seen.under) == (6, "collective", "backward")
        assert seen.waits is not None
        assert (seen.waits.axis, seen.waits.ranks, seen.waits.operation) == ("tp", (0, 1, 2, 3), "all_reduce")
        assert (seen.waits.sequence, seen.waits.bytes, seen.waits.done) == (6, 4096, 0.0)
        assert seen.begun == {("tp", (0, 1, 2, 3)): 6}
        assert [one.sequence for one in seen.recent] == [1, 2, 3, 4, 5, 6]
        assert all(one.began <= one.done for one in seen.recent[:-1])
    finally:
        remove(os.getpid())


def test_restarted_rank_has_a_new_pulse(tmp_path):
    try:
        first = Pulse.open(tmp_path, 0, 1, 0, os.getpid())
        first.step(7)
        (path,) = find(tmp_path)
        reader = PulseReader(path)
        assert reader.is_current()
        Pulse.open(tmp_path, 0, 1, 1, os.getpid())
        assert not reader.is_current()
        assert reader.read().step == 7, "what the first one said can still be read"
        (path,) = find(tmp_path)
        assert (PulseReader(path).read().step, PulseReader(path).read().generation) == (0, 1)
    finally:
        remove(os.getpid())


def test_pulses_of_earlier_generations_are_ignored(tmp_path):
    """Check restarts after a node left and returned, in which processes start again with other rank numbers."""
    try:
        for rank in (3, 4):
            Pulse.open(tmp_path, rank, 8, 1, os.getpid())
        Pulse.open(tmp_path, 2, 8, 2, os.getpid())
        Pulse.open(tmp_path, 3, 8, 2, os.getpid())
        assert [PulseReader(path).read().rank for path in find(tmp_path)] == [2, 3]
        assert [reader.read().generation for reader in open_readers(tmp_path)] == [2, 2]
    finally:
        remove(os.getpid())


def test_pulse_is_unreadable_until_its_owner_is_set(tmp_path, monkeypatch):
    """Check a read before the process id is set: a watcher would take process 0 for the rank, and never see a stop."""
    real, early = guard.read_birth, []

    def looked_at(pid: int) -> int | None:
        for file in find(tmp_path):
            with pytest.raises(ValueError, match="not a pulse file"):
                PulseReader(file)
            early.append(file)
        return real(pid)

    monkeypatch.setattr("gangline.pulse.write.read_birth", looked_at)
    Pulse.open(tmp_path, 3, 8, 2, owner=os.getpid())
    (file,) = find(tmp_path)
    assert early == [file]
    seen = PulseReader(file).read()
    assert (seen.pid, seen.rank, seen.world, seen.generation, seen.alive) == (os.getpid(), 3, 8, 2, True)
    remove(os.getpid())


def test_phase_histogram_excludes_first_steps(tmp_path):
    try:
        mine, short = Pulse.open(tmp_path, 0, 1, 0, os.getpid()), 0
        for step in range(11, 21):
            mine.step(step)
            began = time.perf_counter()
            with mine.enter_phase("forward"):
                time.sleep(0.05 if step < 14 else 0.001)
            short += time.perf_counter() - began < 0.05
        (path,) = find(tmp_path)
        lasted = PulseReader(path).read().lasted["forward"]
        assert sum(lasted) == 7
        assert max(layout.compute_upper(n) for n, count in enumerate(lasted) if count) * 1e-9 >= 0.001
        assert sum(lasted[: layout.find_column(50_000_000) + 1]) >= short, (
            "as long as they were, where the machine paused"
        )
    finally:
        remove(os.getpid())


def test_pulse_reads_are_atomic(tmp_path):
    """Check that phase and beat of each read match, with a writer that changes its phase about every 10 µs."""
    code = (
        "import sys, time; from gangline.pulse.write import Pulse\n"
        "pulse, end = Pulse.open(sys.argv[1], 0, 1, 0, int(sys.argv[2])), time.monotonic() + 60\n"
        "while time.monotonic() < end:\n"
        "    for phase in (4, 6, 7):\n"
        "        pulse.enter(phase); sum(range(300))"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(os.getpid())])
    try:
        deadline = time.monotonic() + 60
        while not (found := find(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.01)
        reader, read = PulseReader(found[0]), []
        while len(read) < 300 and time.monotonic() < deadline:
            read.append(reader.read())
        moved = [seen for seen in read if seen.beat]
        assert moved
        for seen in moved:
            assert seen.phase == PHASES[(4, 6, 7)[(seen.beat // 2 - 1) % 3]]
        assert read[-1].beat > read[0].beat
    finally:
        writer.kill()
        writer.wait()
        remove(os.getpid())


def waiting(run_dir: str, seconds: float):
    """Return (phase, collective) that rank 1 reads from the pulse of rank 0, while rank 1 delays an all-reduce."""
    try:
        mine = Pulse.open(run_dir, rank.index, rank.world, 0, os.getppid())
        comm = Pulsed(rank.make_comms(Mesh.of({"dp_shard": rank.world}), False).get_comm("dp_shard"), mine)
        comm.barrier()
        seen = None
        if rank.index == 1:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                readers = [PulseReader(path) for path in find(run_dir)]
                seen = next(one for one in (reader.read() for reader in readers) if one.rank == 0)
                if seen.waits is not None and seen.waits.operation == "all_reduce":
                    break
                time.sleep(0.01)
        comm.all_reduce(torch.ones(3))
        return seen and (seen.phase, seen.waits and (seen.waits.operation, seen.waits.sequence, seen.waits.bytes))
    finally:
        use(Pulse())


def test_pulse_shows_the_current_collective_wait(tmp_path):
    try:
        assert get_pool(2).run(waiting, str(tmp_path), 120.0)[1] == ("collective", ("all_reduce", 2, 12))
    finally:
        sweep()
        for path in find(tmp_path):
            path.unlink()
