"""The pulse of a rank: what it writes others read, also when it is dead; nothing is left behind, and no time added."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gangline import pulse
from gangline.comm.pulsed import Pulsed
from gangline.comm.transport import connect
from gangline.launch import guard
from gangline.mesh import Mesh
from gangline.pulse import layout, memory
from gangline.pulse.layout import PHASES, ROWS
from gangline.pulse.read import PulseReader
from gangline.pulse.write import Pulse
from gangline_testkit import rank
from gangline_testkit.pool import pool

NUMBER = {name: number for number, name in enumerate(PHASES)}

# A launcher with one rank, which is killed in its backward pass, in a collective of a group of four.
RANK = """
import os, signal, sys
from gangline.pulse.write import Pulse
pulse = Pulse.open(sys.argv[1], rank=3, world=8, generation=2, owner=int(sys.argv[2]))
group = pulse.group("tp", (0, 1, 2, 3))
for step in range(1, 7):
    pulse.step(step)
    with pulse.phase("backward"):
        row = pulse.begin(group, 1, 4096)
        before = pulse.wait(row)
        if step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        pulse.done(row, before)
"""
LAUNCHER = f"""
import os, subprocess, sys
subprocess.run([sys.executable, "-c", {RANK!r}, sys.argv[1], str(os.getpid())])
print("killed", flush=True)
sys.stdin.read()
"""


def launcher(run_dir: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "killed\n"
    return process


def test_of_a_killed_rank_it_is_read_and_of_a_dead_launcher_it_is_removed(tmp_path):
    dead, living = launcher(tmp_path / "dead"), launcher(tmp_path / "living")
    try:
        (path,) = pulse.find(tmp_path / "dead")
        seen = PulseReader(path).read()
        assert (seen.rank, seen.world, seen.generation, seen.alive) == (3, 8, 2, False)
        assert (seen.step, seen.phase, seen.under) == (6, "collective", "backward")
        assert seen.waits is not None
        assert (seen.waits.axis, seen.waits.ranks, seen.waits.operation) == ("tp", (0, 1, 2, 3), "all_reduce")
        assert (seen.waits.sequence, seen.waits.bytes, seen.waits.done) == (6, 4096, 0.0)
        assert seen.begun == {("tp", (0, 1, 2, 3)): 6}
        assert [one.sequence for one in seen.recent] == [1, 2, 3, 4, 5, 6]
        assert all(one.began <= one.done for one in seen.recent[:-1])
        os.killpg(dead.pid, signal.SIGKILL)
        dead.wait()
        assert pulse.find(tmp_path / "dead") == [], "its launcher is dead"
        foreign = memory.ROOT / "gangline-pulse-of-somebody-else"
        foreign.write_bytes(b"")
        pulse.sweep()
        assert not path.exists()
        assert len(pulse.find(tmp_path / "living")) == 1
        assert foreign.exists()
        foreign.unlink()
        pulse.remove(living.pid)
        assert pulse.find(tmp_path / "living") == []
    finally:
        pulse.remove(living.pid)
        for process in (dead, living):
            if process.poll() is None:
                process.communicate("")


def test_a_rank_that_is_started_again_has_a_pulse_of_its_own(tmp_path):
    try:
        first = Pulse.open(tmp_path, 0, 1, 0, os.getpid())
        first.step(7)
        (path,) = pulse.find(tmp_path)
        reader = PulseReader(path)
        assert reader.current()
        Pulse.open(tmp_path, 0, 1, 1, os.getpid())
        assert not reader.current()
        assert reader.read().step == 7, "what the first one said can still be read"
        (path,) = pulse.find(tmp_path)
        assert (PulseReader(path).read().step, PulseReader(path).read().generation) == (0, 1)
    finally:
        pulse.remove(os.getpid())


def test_ranks_that_a_launcher_has_no_longer_are_not_found(tmp_path):
    """A node that leaves and comes back makes others begin again, with other ranks than they had."""
    try:
        for rank in (3, 4):
            Pulse.open(tmp_path, rank, 8, 1, os.getpid())
        Pulse.open(tmp_path, 2, 8, 2, os.getpid())
        Pulse.open(tmp_path, 3, 8, 2, os.getpid())
        assert [PulseReader(path).read().rank for path in pulse.find(tmp_path)] == [2, 3]
        assert [reader.read().generation for reader in pulse.readers(tmp_path)] == [2, 2]
    finally:
        pulse.remove(os.getpid())


def test_it_can_be_read_as_soon_as_it_says_whose_it_is_and_not_before(tmp_path, monkeypatch):
    """A watcher looks at any moment; who it took for process 0 would never be seen to be stopped."""
    real, early = guard.born, []

    def looked_at(pid: int) -> int | None:
        for file in pulse.find(tmp_path):
            with pytest.raises(ValueError, match="no pulse"):
                PulseReader(file)
            early.append(file)
        return real(pid)

    monkeypatch.setattr("gangline.pulse.write.born", looked_at)
    Pulse.open(tmp_path, 3, 8, 2, owner=os.getpid())
    (file,) = pulse.find(tmp_path)
    assert early == [file]
    seen = PulseReader(file).read()
    assert (seen.pid, seen.rank, seen.world, seen.generation, seen.alive) == (os.getpid(), 3, 8, 2, True)
    pulse.remove(os.getpid())


def test_without_shared_memory_a_rank_goes_on_unseen(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "ROOT", tmp_path / "none")
    Pulse.open(tmp_path, 0, 1, 0, os.getpid()).step(3)
    (tmp_path / "full").mkdir()
    monkeypatch.setattr(memory, "ROOT", tmp_path / "full")
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    Pulse.open(tmp_path, 0, 1, 0, os.getpid()).step(3)
    assert list((tmp_path / "full").iterdir()) == []


CLOCK = 1e-3  # of what is measured by two clocks, in seconds


def test_rows_are_where_the_time_went_and_add_up():
    mine = Pulse()
    began = time.perf_counter()
    mine.rows()
    mine.step(1)
    with mine.phase("forward_backward"):
        forward = time.perf_counter()
        with mine.phase("forward"):
            time.sleep(0.02)
            row = mine.begin(mine.group("tp", (0, 1)), 2, 8)
            before = mine.wait(row)
            time.sleep(0.05)
            mine.done(row, before)
        forward = time.perf_counter() - forward
        with mine.phase("backward"):
            time.sleep(0.03)
    with mine.phase("no such phase"):
        time.sleep(0.01)
    asked = time.perf_counter()
    found = dict(zip(ROWS, mine.rows(), strict=True))
    assert 0.11 <= sum(found.values()) <= time.perf_counter() - began + CLOCK
    assert found["collective"] >= 0.05
    assert 0.02 <= found["forward"] <= forward - found["collective"] + CLOCK, "the wait is not the forward's"
    assert found["backward"] >= 0.03
    assert found["other"] >= 0.01
    assert sum(mine.rows()) <= time.perf_counter() - asked + CLOCK, "each second is in one row alone"


def test_how_long_phases_last_is_kept_without_the_first_steps(tmp_path):
    try:
        mine, short = Pulse.open(tmp_path, 0, 1, 0, os.getpid()), 0
        for step in range(11, 21):
            mine.step(step)
            began = time.perf_counter()
            with mine.phase("forward"):
                time.sleep(0.05 if step < 14 else 0.001)
            short += time.perf_counter() - began < 0.05
        (path,) = pulse.find(tmp_path)
        lasted = PulseReader(path).read().lasted["forward"]
        assert sum(lasted) == 7
        assert max(layout.upper(n) for n, count in enumerate(lasted) if count) * 1e-9 >= 0.001
        assert sum(lasted[: layout.column(50_000_000) + 1]) >= short, "as long as they were, where the machine paused"
    finally:
        pulse.remove(os.getpid())


def test_columns_of_a_histogram_are_in_order_and_a_quarter_wide():
    draw = random.Random(0)
    numbers = sorted(draw.randrange(1 << draw.randrange(1, 62)) for _ in range(20_000))
    columns = [layout.column(number) for number in numbers]
    assert columns == sorted(columns)
    for number, column in zip(numbers, columns, strict=True):
        assert number < layout.upper(column) <= 1.25 * number + 1


def test_what_is_read_is_of_one_moment(tmp_path):
    """A writer that changes its phase every ten microseconds or so: phase and beat belong together in what is read."""
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
        while not (found := pulse.find(tmp_path)) and time.monotonic() < deadline:
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
        pulse.remove(os.getpid())


def recorded():
    """Every operation through a pulse, beside the same without."""
    mine = Pulse()
    bare = rank.comms(Mesh.of({"dp_shard": rank.world}), False).axis("dp_shard")
    comm, n = Pulsed(bare, mine), bare.size
    x = torch.arange(4.0 * n).add(bare.index)
    for started in (False, True):
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            own = getattr(comm, f"start_{name}")(x.clone()).wait() if started else getattr(comm, name)(x.clone())
            assert own.equal(getattr(bare, name)(x.clone()))
    into = torch.empty_like(x)
    other = (bare.index + 1) % n
    comm.exchange([(x, other)], [(into, (bare.index - 1) % n)])
    comm.exchange([(x, bare.index)], [(into, bare.index)])
    assert comm.broadcast(x.clone(), 1).equal(bare.broadcast(x.clone(), 1))
    comm.barrier()
    words = mine._words.tolist()
    rows = [
        words[layout.RECORD + layout.ROW_WORDS * row :][: layout.ROW_WORDS] for row in range(words[layout.RECORDED])
    ]
    assert all(row[layout.DONE] >= row[layout.BEGAN] > 0 for row in rows)
    assert words[layout.PHASE] == NUMBER["start"]
    assert words[layout.ROW] == 0
    return [(layout.OPERATIONS[row[layout.CODE] % 16], row[layout.SEQUENCE]) for row in rows]


def test_each_collective_is_recorded_in_order_and_computes_what_it_did():
    four = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    wanted = [(name, number) for number, name in enumerate(four * 2, 1)]
    assert pool(2).run(recorded) == [[*wanted, ("exchange", 8), ("broadcast", 9), ("barrier", 10)]] * 2


def waiting(run_dir: str, seconds: float):
    """Rank 1 comes late to a sum; what rank 0's pulse says meanwhile, read by rank 1."""
    try:
        mine = Pulse.open(run_dir, rank.index, rank.world, 0, os.getppid())
        comm = Pulsed(rank.comms(Mesh.of({"dp_shard": rank.world}), False).axis("dp_shard"), mine)
        comm.barrier()
        seen = None
        if rank.index == 1:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                readers = [PulseReader(path) for path in pulse.find(run_dir)]
                seen = next(one for one in (reader.read() for reader in readers) if one.rank == 0)
                if seen.waits is not None and seen.waits.operation == "all_reduce":
                    break
                time.sleep(0.01)
        comm.all_reduce(torch.ones(3))
        return seen and (seen.phase, seen.waits and (seen.waits.operation, seen.waits.sequence, seen.waits.bytes))
    finally:
        pulse.use(Pulse())


def test_who_waits_for_whom_is_seen_while_it_waits(tmp_path):
    try:
        assert pool(2).run(waiting, str(tmp_path), 120.0)[1] == ("collective", ("all_reduce", 2, 12))
    finally:
        pulse.sweep()
        for path in pulse.find(tmp_path):
            path.unlink()


def test_a_run_of_one_rank_writes_no_collective():
    comms = connect(Mesh.of({}), pulse=Pulse())
    assert not isinstance(comms.world, Pulsed)


def test_a_phase_costs_about_a_microsecond():
    mine = Pulse()
    mine.step(1), mine.step(9)
    best = min(_seconds(mine) for _ in range(20))
    assert best / 1000 < 20e-6, "ten times what it takes of a processor"


def _seconds(mine: Pulse) -> float:
    began = time.thread_time()  # whatever else the machine does meanwhile
    for _ in range(500):
        mine.enter(6)
        mine.enter(7)
    return time.thread_time() - began


def test_processes_are_known_by_when_they_began():
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert guard.born(child.pid) == guard.born(child.pid) is not None
    child.communicate(b"")
    assert guard.born(child.pid) is None
