"""Pulse of a rank: contents after the rank is killed, removal at the end, time cost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from gangline.comm.pulsed import Pulsed
from gangline.comm.transport import connect
from gangline.launch import guard
from gangline.mesh import Mesh
from gangline.pulse import layout, memory
from gangline.pulse.layout import PHASES, ROWS
from gangline.pulse.write import Pulse
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

NUMBER = {name: number for number, name in enumerate(PHASES)}

# A launcher with one rank, which is killed in its backward pass.
RANK = """
import os, signal, sys
from gangline.pulse.write import Pulse
with Pulse.open(sys.argv[1], rank=3, world=8, generation=2, owner=int(sys.argv[2])).enter_phase("backward"):
    os.kill(os.getpid(), signal.SIGKILL)
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


def test_killed_rank_pulse_stays_until_launcher_ends(tmp_path):
    dead, living = launcher(tmp_path / "dead"), launcher(tmp_path / "living")
    try:
        (path,) = memory.list_pulses(tmp_path / "dead")
        words = memoryview(path.read_bytes()).cast("q")
        assert (words[layout.RANK], words[layout.PHASE]) == (3, NUMBER["backward"])
        assert memory.parse_owner(path) == dead.pid
        os.killpg(dead.pid, signal.SIGKILL)
        dead.wait()
        assert memory.list_pulses(tmp_path / "dead") == [], "its launcher is dead"
        other = memory.ROOT / "gangline-pulse-of-somebody-else"
        other.write_bytes(b"")
        memory.sweep()
        assert not path.exists()
        assert len(memory.list_pulses(tmp_path / "living")) == 1
        assert other.exists()
        other.unlink()
        memory.remove(living.pid)
        assert memory.list_pulses(tmp_path / "living") == []
    finally:
        memory.remove(living.pid)
        for process in (dead, living):
            if process.poll() is None:
                process.communicate("")


def test_rank_without_shared_memory_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "ROOT", tmp_path / "none")
    Pulse.open(tmp_path, 0, 1, 0, os.getpid()).step(3)
    (tmp_path / "full").mkdir()
    monkeypatch.setattr(memory, "ROOT", tmp_path / "full")
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    Pulse.open(tmp_path, 0, 1, 0, os.getpid()).step(3)
    assert list((tmp_path / "full").iterdir()) == []


CLOCK = 1e-3  # tolerance between two clocks, in seconds


def test_phase_seconds_add_up_to_elapsed_time():
    mine = Pulse()
    began = time.perf_counter()
    mine.take_rows()
    mine.step(1)
    with mine.enter_phase("forward_backward"):
        forward = time.perf_counter()
        with mine.enter_phase("forward"):
            time.sleep(0.02)
            row = mine.begin(mine.group("tp", (0, 1)), 2, 8)
            before = mine.wait(row)
            time.sleep(0.05)
            mine.finish(row, before)
        forward = time.perf_counter() - forward
        with mine.enter_phase("backward"):
            time.sleep(0.03)
    with mine.enter_phase("no such phase"):
        time.sleep(0.01)
    asked = time.perf_counter()
    found = dict(zip(ROWS, mine.take_rows(), strict=True))
    assert 0.11 <= sum(found.values()) <= time.perf_counter() - began + CLOCK
    assert found["collective"] >= 0.05
    assert 0.02 <= found["forward"] <= forward - found["collective"] + CLOCK, "the wait is not the forward's"
    assert found["backward"] >= 0.03
    assert found["other"] >= 0.01
    assert sum(mine.take_rows()) <= time.perf_counter() - asked + CLOCK, "each second is in one row alone"


def test_histogram_columns_are_ordered_and_bounded():
    draw = random.Random(0)
    numbers = sorted(draw.randrange(1 << draw.randrange(1, 62)) for _ in range(20_000))
    columns = [layout.find_column(number) for number in numbers]
    assert columns == sorted(columns)
    for number, column in zip(numbers, columns, strict=True):
        assert number < layout.compute_upper(column) <= 1.25 * number + 1


def recorded():
    """Run every collective with and without a pulse, and return the collectives that the pulse recorded."""
    mine = Pulse()
    bare = rank.make_comms(Mesh.of({"dp_shard": rank.world}), False).get_comm("dp_shard")
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


def test_pulse_records_each_collective_in_order():
    four = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    wanted = [(name, number) for number, name in enumerate(four * 2, 1)]
    assert get_pool(2).run(recorded) == [[*wanted, ("exchange", 8), ("broadcast", 9), ("barrier", 10)]] * 2


def test_single_rank_run_records_no_collective():
    comms = connect(Mesh.of({}), pulse=Pulse())
    assert not isinstance(comms.world, Pulsed)


def test_pulse_phase_change_takes_under_20_microseconds():
    mine = Pulse()
    mine.step(1), mine.step(9)
    best = min(_seconds(mine) for _ in range(20))
    assert best / 1000 < 20e-6, "ten times what it takes of a processor"


def _seconds(mine: Pulse) -> float:
    began = time.thread_time()  # CPU time of this thread, which other processes do not change
    for _ in range(500):
        mine.enter(6)
        mine.enter(7)
    return time.thread_time() - began


def test_process_birth_identifies_live_process():
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert guard.read_birth(child.pid) == guard.read_birth(child.pid) is not None
    child.communicate(b"")
    assert guard.read_birth(child.pid) is None
