"""Measure recovery from kill -9 to the next completed step: of a rank, an agent, and a node; compared with torchrun.

    python benchmarks/recovery.py [--rounds 10]

Every round runs each way once, on the CPU, so that load on the machine affects all ways equally. Prints medians and
maxima. All ways train the same small model and save a checkpoint every fifth step; torchrun, with its defaults, starts
`train` as its ranks. Also prints the number of repeated steps: none if a memory tier has every step, and, with a copy
in another node's memory, none after the loss of a node either. Goals: a rank of four in at most 1.5 x `import torch`
(four at once) + 2 s; a node of two in at most 10 s.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gangline_health.pulses import PulseReader, Seen, find
from gangline_testkit.ports import free_port
from gangline_testkit.real_runs import SMALL, copy_environment, write_small_text

SECONDS = 240.0
# seconds before the second agent starts: torchrun's first agent must host the store, whose loss ends the job
HOSTS_SECONDS = 15.0
TRAIN = ["-m", "gangline.cli.train"]
TORCHRUN = ["-m", "torch.distributed.run"]
IMPORT = "import torch, four at once"
MEMORY = ("checkpoint=zarr", "checkpoint.memory_every=1")
COPIES = "checkpoint.memory_copies=1"
LAYOUT = ["parallel=ddp", "checkpoint.every=5", "run.steps=1000000", "batch.sequence_length=128"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="text in the names of the ways to measure; default: all")
    options = parser.parse_args()
    ways: dict[str, Callable[[], tuple[float, int]]] = {
        IMPORT: time_import,
        "rank of four, elastic": lambda: recover(elastic("1", 4), rank_of(1)),
        "rank of four, torchrun": lambda: recover([torchrun(4)], rank_of(1)),
        "rank of four, memory": lambda: recover(elastic("1", 4, *MEMORY), rank_of(1)),
        "agent of two, elastic": lambda: recover(elastic("1:2", 2), agent),
        "agent of two, memory": lambda: recover(elastic("1:2", 2, *MEMORY), agent),
        "node of two, elastic": lambda: recover(elastic("1:2", 2), node),
        "node of two, a peer's memory": lambda: recover(elastic("1:2", 2, *MEMORY, COPIES), node_and_memory),
        "node of two, torchrun": lambda: recover(torchruns(), node),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways if options.only in name}
    again: dict[str, list[int]] = {name: [] for name in seconds}
    for _ in range(options.rounds):
        for name, measure in ((name, ways[name]) for name in seconds):
            took, steps = measure()
            seconds[name].append(took)
            again[name].append(steps)
            print(f"{name:<28} {took:7.2f} {steps:6} repeated steps; load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"\n{'seconds':<28} {'median':>7} {'maximum':>7} {'repeated, maximum':>17}")
    for name, found in seconds.items():
        print(f"{name:<28} {statistics.median(found):7.2f} {max(found):7.2f} {max(again[name]):17}")
    if imports := seconds.get(IMPORT):
        print(f"goals in seconds: a rank {1.5 * statistics.median(imports) + 2:.2f}, a node 10.00")


def time_import() -> tuple[float, int]:
    began = time.time()
    for process in [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(4)]:
        process.wait()
    return time.time() - began, 0


def elastic(nodes: str, ranks: int, *more: str) -> list[list[str]]:
    words = ["launch=elastic", f"launch.nodes={nodes}", f"launch.processes={ranks}", "launch.agents=1", *more]
    return [[*TRAIN, *words]] * int(nodes[-1])  # each command starts the agent of one node


def torchrun(ranks: int, *more: str) -> list[str]:
    return [*TORCHRUN, f"--nproc-per-node={ranks}", "--max-restarts=3", *more, *TRAIN]


def torchruns() -> list[list[str]]:
    meet = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    return [torchrun(1, "--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-id=bench", meet)] * 2


def recover(commands: list[list[str]], victims: Callable[[list[int], Path], list[int]]) -> tuple[float, int]:
    """Return (seconds from the kill to the first step after the restart, number of repeated steps)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        words = [f"data.path={write_small_text(Path(folder, 'corpus'))}", *SMALL, *LAYOUT, f"run.dir={out}"]
        environment = {**copy_environment(), "OMP_NUM_THREADS": "1"}
        agents: list[subprocess.Popen[bytes]] = []
        try:
            for number, command in enumerate(commands, 1):
                agents.append(
                    subprocess.Popen(
                        [sys.executable, *command, *words],
                        cwd=folder,
                        env={**environment, "GANGLINE_NODE": f"127.0.0.{number}"},
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
                time.sleep(HOSTS_SECONDS if "--rdzv-backend=c10d" in command else 0)
            if not wait_for(lambda: [record for record in newest(out) if record["step"] >= 20]):
                sys.exit("the run did not start")
            before = newest(out)[-1]["generation"]
            began = time.time()
            for pid in victims([agent.pid for agent in agents], out):
                os.kill(pid, signal.SIGKILL)
            found = wait_for(lambda: [record for record in newest(out) if record["generation"] > before])
            if not found:
                return math.inf, -1
            done = max(record["step"] for record in newest(out) if record["generation"] == before)
            return found[0]["time"] - began, done + 1 - found[0]["step"]
        finally:
            for agent in agents:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


def rank_of(rank: int) -> Callable[[list[int], Path], list[int]]:
    def victims(agents: list[int], out: Path) -> list[int]:
        return [seen.pid for seen in seen_ranks(out) if seen.rank == rank]

    return victims


def agent(agents: list[int], out: Path) -> list[int]:
    """Return the agent of rank 1. The processes that it started end with it."""
    return node(agents, out)[:1]


def node(agents: list[int], out: Path) -> list[int]:
    """Return the agent of rank 1 and rank 1: all processes of a lost machine."""
    (rank,) = [seen.pid for seen in seen_ranks(out) if seen.rank == 1]
    above = rank
    while above not in agents:
        above = parent(above)
    return [above, rank]


def node_and_memory(agents: list[int], out: Path) -> list[int]:
    """Return the processes of `node`, and the one that keeps that node's checkpoints in memory."""
    agent, rank = node(agents, out)
    beside = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and kept_by(entry, agent)]
    return [agent, rank, *beside]


def kept_by(entry: Path, agent: int) -> bool:
    """Return whether a process is a sidecar of this agent."""
    try:
        words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return "gangline_basics.launch.sidecars" in words and str(agent) in words


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def seen_ranks(out: Path) -> list[Seen]:
    return [seen for seen in (PulseReader(path).read() for path in find(out)) if seen.alive]


def newest(out: Path) -> list[dict]:
    """Return the latest metrics records."""
    try:
        content = (out / "metrics.jsonl").read_bytes()[-20000:]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in content.split(b"\n")[1:-1]]


def wait_for(what: Callable[[], list]) -> list:
    """Return the result of `what` as soon as it is not empty; empty after `SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


if __name__ == "__main__":
    main()
