"""Agents with the environment variables of pods, as local processes: a JobSet without a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gangline.config.compose import compose_one
from gangline.run.directory import RunDirectory
from gangline.run.ending import read_ending
from gangline.run.events import read_events
from gangline_launch.kubernetes import tries
from gangline_testkit import warm
from gangline_testkit.processes import kill
from gangline_testkit.real_runs import SMALL, RealRuns

SECONDS = 240.0
WORDS = (
    "parallel=ddp",
    "run.device=cpu",
    "run.steps=100000",
    "schedule.warmup_steps=5",
    "checkpoint.every=5000",
    "launch=kubernetes",
    "launch.processes=2",
    "launch.image=x",
)


class Pods:
    """Run and its pods, each of which is an agent with the environment variables of the manifest."""

    def __init__(self, runs: RealRuns) -> None:
        self.runs, self.path = runs, runs.directory / "out"
        self.started: list[subprocess.Popen[str]] = []

    def submit(self, *words: str) -> None:
        """Write the run directory, as the command does before it applies the manifest."""
        own = (*self.runs.settings, *WORDS, f"launch.volume=runs:{self.runs.directory}", f"run.dir={self.path}")
        RunDirectory.create(compose_one([*own, *words])).unlock()
        (self.path / "launch").mkdir()

    def start(self, node: str, index: int, nodes: str) -> subprocess.Popen[str]:
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GANGLINE_KUBERNETES_NODE": node,
            "GANGLINE_POD": "127.0.0.1",
            "GANGLINE_PLACE": str(index),
        }
        command = warm.make_command("gangline_launch.agent", variables)
        words = [str(self.path), "--nodes", nodes, "--per-node", "1", "--processes", "2"]
        with (self.path / "launch" / f"node-{index}.out").open("a") as out:
            process = subprocess.Popen(
                [*command, *words], env=variables, stdout=out, stderr=out, text=True, start_new_session=True
            )
        self.started.append(process)
        return process

    def launches(self) -> list[dict]:
        return [line for line in read_events(self.path) if line["event"] == "launch"]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with RealRuns(tmp_path, SMALL) as runs:
        found = Pods(runs)
        yield found
        for process in found.started:
            if process.poll() is None:
                kill(process)


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_second_pod_on_node_joins_without_lost_steps(pods):
    """Start two pods of a run on one node, which the cluster allows: the second pod does not replace the first."""
    pods.submit("launch.nodes=2", "launch.spares=1", "launch.gather_seconds=1")
    members = [pods.start("a", 0, "2:3"), pods.start("b", 1, "2:3")]
    pods.runs.wait_for_step(members[0], "out", 5)
    members.append(pods.start("b", 2, "2:3"))
    wait_for(lambda: len(pods.launches()) == 2)
    launch = pods.launches()[-1]
    assert (launch["why"], sorted(launch["nodes"])) == ("joined", ["a/0", "b/1", "b/2"])
    pods.runs.wait_for_step(members[0], "out", pods.runs.read_records("out")[-1]["step"] + 2)
    steps = [json.loads(line)["step"] for line in (pods.path / "metrics.jsonl").read_text().splitlines()[:-1]]
    assert steps == sorted(set(steps)), "steps were done twice"


def test_too_few_pods_fail_job_after_futile_starts(pods):
    """Start one of two pods: it ends with exit code 75, and finally with 2, which fails the JobSet."""
    pods.submit("launch.nodes=2", "launch.join_seconds=1", "launch.futile_requeues=2")
    for code in (75, 2):
        pod = pods.start("a", 0, "2:2")
        assert pod.wait(SECONDS) == code
    ending = read_ending(pods.path)
    assert (ending.reason, ending.exit_code, ending.requeue) == ("mistake", 2, False)
    assert "launch.nodes=2:2: fewer nodes than the minimum joined within 1 s" in ending.evidence
    assert "kubectl describe pods" in ending.evidence


def test_pod_futile_starts_reset_on_new_step(tmp_path):
    def count(step: int) -> tuple[int, int]:
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")
        return tries.count(tmp_path, "0")

    assert [count(step) for step in (4, 4, 9, 9)] == [(1, 4), (2, 4), (1, 9), (2, 9)]
    assert tries.count(tmp_path, "1") == (1, 9), "each pod counts its own starts"
    tries.forget(tmp_path)
    assert count(9) == (1, 9)
