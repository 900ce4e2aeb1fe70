"""Ranks that join a job from environment variables, as separate processes like those of torchrun."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch

from gangline.comm.transport import connect
from gangline.mesh import Mesh
from gangline.train.determinism import use_deterministic_kernels
from gangline_testkit import warm
from gangline_testkit.ports import free_port


def ranks(world: int, body: str, directory: Path) -> list[tuple[int, str]]:
    """Run `body` in `world` processes and return (exit code, output) of each process."""
    script = "from gangline.comm.transport import connect\nfrom gangline.mesh import Mesh\nimport os, torch, time\n"
    (directory / "joins_a_job.py").write_text(script + textwrap.dedent(body))
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ANOTHER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(directory),
    }
    processes = [
        subprocess.Popen(
            warm.make_command("joins_a_job", environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "RANK": str(rank)},
        )
        for rank in range(world)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]


def test_ranks_connect_and_detect_missing_peer(tmp_path):
    body = """
    comms = connect(Mesh.of({"dp_replicate": 2}), deterministic=True, timeout=120)
    comms.store.set(f"rank{comms.rank}", b"here")
    total = comms.get_comm("dp_replicate").all_reduce(torch.tensor([1.0 + comms.rank]))
    comms.world.barrier()
    print(total.item(), comms.store.get("rank0"), comms.store.get("rank1"), type(comms.world).__name__)
    comms.close()
    assert not torch.distributed.is_initialized()

    os.environ["MASTER_PORT"] = os.environ["ANOTHER_PORT"]
    comms = connect(Mesh.of({"dp_replicate": 2}), timeout=10)  # both have just met, so that neither comes late
    if comms.rank == 0:
        began = time.time()
        try:
            comms.get_comm("dp_replicate").all_reduce(torch.ones(3))
        except RuntimeError:
            assert time.time() - began > 7
            print("noticed", flush=True)
        comms.store.set("noticed", b"")
        comms.store.get("heard")  # the store ends with this rank
    else:
        while not comms.store.check(["noticed"]):
            time.sleep(0.1)
        comms.store.set("heard", b"")
    comms.close()
    """
    (code, printed), (other_code, other_printed) = ranks(2, body, tmp_path)
    assert (code, other_code) == (0, 0), printed + other_printed
    assert "3.0 b'here' b'here' Ordered" in printed
    assert "3.0 b'here' b'here' Ordered" in other_printed
    assert "noticed" in printed


def test_restarted_ranks_ignore_old_keys_in_agent_store(tmp_path):
    """Use torchrun's own store, which outlives the ranks and still holds the keys of the earlier ranks."""
    body = """
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    if os.environ["RANK"] == "0":
        port = int(os.environ["MASTER_PORT"])
        agent = torch.distributed.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    for start in ("0", "1"):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = start
        comms = connect(Mesh.of({"dp_replicate": 2}), timeout=60)
        comms.store.add("ranks", 1)
        comms.world.barrier()
        print(start, comms.store.add("ranks", 0))
        comms.world.barrier()
        comms.close()
    """
    for code, printed in ranks(2, body, tmp_path):
        assert code == 0, printed
        assert "0 2" in printed
        assert "1 2" in printed


def test_mesh_size_other_than_job_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="the mesh has 2 ranks, but the job has 3"):
        connect(Mesh.of({"dp_replicate": 2}))


def test_cpu_does_not_enable_deterministic_algorithms():
    use_deterministic_kernels(torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()
