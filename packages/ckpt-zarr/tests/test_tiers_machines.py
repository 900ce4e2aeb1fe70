"""Memory tier on two machines: two agents of torchrun, each with a private /dev/shm if mounting is allowed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Runs, can_mount

from gangline_testkit.ports import free_port
from gangline_testkit.processes import find_children

PRIVATE = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with Runs(tmp_path) as found:
        yield found


def agents(runs: Runs, *words: str) -> list[subprocess.Popen[str]]:
    """Start the agents of two machines, with two ranks each."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=machines"]
    agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=2", *rendezvous]
    prefix = PRIVATE if can_mount() else []
    return [runs.start(*words, prefix=prefix, agent=agent, GANGLINE_NODE=f"node-{number}") for number in range(2)]


def workers(agent: int) -> list[int]:
    """Return the process ids of the ranks that an agent has started."""
    return [pid for pid, command in find_children(agent).items() if "gangline.cli.train" in command]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_killed_rank_on_two_machines_resumes_from_memory(runs: Runs, layout: str) -> None:
    """Run fsdp, where each machine has its ranks' data, and ddp, where ranks read the other machine's memory too."""
    words = ("run.steps=120", "checkpoint.every=30", f"parallel={layout}", "run.deterministic=on")
    started = agents(runs, "run.dir=out", *words, "checkpoint.memory_every=5")
    runs.wait_for_step(started[0], "out", 48)
    os.kill(workers(started[1].pid)[0], signal.SIGKILL)
    for process in started:
        runs.finish(process)
    first, second = runs.read_attempts("out")
    assert first["start"] is None
    step = int(second["start"].removeprefix("step-"))
    assert step > 30
    assert step % 30 != 0
    assert [record["step"] for record in runs.read_records("out")] == list(range(1, 121))
    assert runs.read_records("out")[-1]["attempt"] == 1
