"""Two agents of torchrun with two processes each, as on two machines: the loss curve of one process."""

from __future__ import annotations

from curves import STEPS, same

from gangline_testkit.ports import free_port


def test_two_agents_match_one_process(curves):
    agent = [
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=two-agents",
    ]
    for process in [curves.start_torchrun(agent, "run.dir=two-agents", "parallel=3d") for _ in range(2)]:
        curves.finish(process)
    same(curves.read_records("two-agents"), curves.alone[:STEPS])
