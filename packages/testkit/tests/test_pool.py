"""Pool of ranks: real processes, forked once, reused after passing tests and replaced after failing tests."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass

import pytest
import torch

from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.plugin.registry import installed
from gangline_basics.launch import forkserver
from gangline_testkit import rank
from gangline_testkit.install import as_installed
from gangline_testkit.pool import PoolBroken, get_pool


@dataclass
class Scale:
    """Argument for a rank; its class is defined in this test file."""

    by: float


def who() -> tuple[int, int, int, int]:
    return rank.index, rank.world, os.getpid(), torch.get_num_threads()


def summed(scale: Scale) -> torch.Tensor:
    comm = rank.make_comms(Mesh.of({"dp_shard": rank.world})).get_comm("dp_shard")
    return comm.all_reduce(torch.full((3,), float(rank.index + 1)) * scale.by)


def along(axis: str) -> tuple[int, ...]:
    return rank.make_comms(Mesh.of({"dp_replicate": 2, "dp_shard": 2})).get_comm(axis).ranks


def one_raises(which: int) -> None:
    if rank.index == which:
        raise UserError("the corpus is empty.", "Give data.path")
    summed(Scale(1.0))  # the other ranks wait in this all-reduce


def one_hangs(which: int) -> None:
    if rank.index == which:
        time.sleep(60)


def one_dies(which: int) -> None:
    if rank.index == which:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class Stubborn(Exception):
    """Exception that pickle cannot restore, because its constructor takes a keyword-only argument."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def raises_stubborn() -> None:
    raise Stubborn(code=7)


def has_dynamo() -> bool:
    return "torch._dynamo" in sys.modules


def test_ranks_preload_modules_after_earlier_server_start(monkeypatch) -> None:
    monkeypatch.setattr(forkserver, "PRELOAD", forkserver.PRELOAD[:1])
    forkserver.warm()
    assert get_pool(1).run(has_dynamo) == [True]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_have_index_and_one_thread(world: int) -> None:
    answers = get_pool(world).run(who)
    assert [(index, of, threads) for index, of, _, threads in answers] == [(i, world, 1) for i in range(world)]
    assert len({pid for _, _, pid, _ in answers} | {os.getpid()}) == world + 1


def test_pool_reuses_rank_processes() -> None:
    first = [pid for _, _, pid, _ in get_pool(2).run(who)]
    assert [pid for _, _, pid, _ in get_pool(2).run(who)] == first == get_pool(2).pids


@pytest.mark.parametrize("world", [1, 2, 4])
def test_pool_accepts_class_defined_in_test_file(world: int) -> None:
    for answer in get_pool(world).run(summed, Scale(2.0)):
        assert answer.tolist() == [world * (world + 1.0)] * 3


def test_mesh_groups_of_each_axis() -> None:
    assert get_pool(4).run(along, "dp_shard") == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert get_pool(4).run(along, "dp_replicate") == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_first_failure_names_rank_and_replaces_pool() -> None:
    used = get_pool(2)
    with pytest.raises(UserError, match="the corpus is empty") as caught:
        used.run(one_raises, 1)
    (note,) = caught.value.__notes__
    assert note.startswith("traceback of rank 1 of 2:")
    assert "in one_raises" in note
    assert used.broken
    assert get_pool(2) is not used
    assert get_pool(2).run(summed, Scale(1.0))[0].tolist() == [3.0] * 3


def test_unpicklable_exception_is_named() -> None:
    with pytest.raises(RuntimeError, match="Stubborn: code 7"):
        get_pool(1).run(raises_stubborn)


def test_a_rank_that_hangs_breaks_the_pool() -> None:
    pids = get_pool(2).pids
    get_pool(2).run(who)  # starts the ranks and their imports before the timeout below
    with pytest.raises(PoolBroken, match=r"ranks 1 of 2 did not answer within 10 s"):
        get_pool(2).run(one_hangs, 1, timeout=10.0)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_dead_rank_breaks_the_pool_immediately() -> None:
    get_pool(2).run(who)
    with pytest.raises(PoolBroken, match="ranks 0 of 2 died"):  # a timeout would be reported as "did not answer"
        get_pool(2).run(one_dies, 0)


def test_rank_killed_between_uses_is_replaced() -> None:
    used = get_pool(2)
    os.kill(used.pids[0], signal.SIGKILL)
    used._processes[0].join()
    assert [index for index, *_ in get_pool(2).run(who)] == [0, 1]


def test_unpicklable_function_is_refused() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        get_pool(2).run(lambda: 1)
    assert not get_pool(2).broken


def test_ranks_end_with_the_calling_process(tmp_path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal
        from gangline_testkit.pool import get_pool

        if __name__ == "__main__":
            print(*get_pool(2).pids, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def has_toys() -> bool:
    return "rows" in installed().get_offers("parallel")


def test_running_pool_sees_newly_installed_plugins() -> None:
    """Install and remove a plugin while the processes of a pool are running."""
    before = get_pool(1).run(has_toys)
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        assert get_pool(1).run(has_toys) == [True]
    assert get_pool(1).run(has_toys) == before == [False]
