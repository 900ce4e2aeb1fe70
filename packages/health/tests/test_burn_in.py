"""`health=burn_in`: measurements of ranks and links, bad ranks reported before step 1, written cluster file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from gangline import UserError
from gangline.config.check import check
from gangline.config.compose import compose_one
from gangline.run.events import read_events
from gangline.train.rank import train
from gangline_basics.cluster.file import load_cluster
from gangline_health.burn_in import measure
from gangline_health.burn_in.check import is_all_reduce_exact
from gangline_health.burn_in.config import BurnInHealth
from gangline_health.burn_in.judge import RankRates, find_bad_ranks, find_slow_links
from gangline_health.commands.burn_in import choose_global_size, run
from gangline_testkit import HealthCheckSuite, warm
from gangline_testkit.pool import get_pool
from gangline_testkit.real_runs import RealRuns
from gangline_testkit.runs import build_small_run
from gangline_testkit.sessions import open_session

FAST = ("health.burn_in.seconds=0.02", "health.burn_in.repetitions=1")
# A healthy rank may be slow on a busy machine with few cores, so only wrong results count here.
CALM = ("health.burn_in.shared=1", *(f"health.burn_in.{name}=0.999" for name in ("matmul", "memory", "link")))


class TestBurnIn(HealthCheckSuite):
    choice = "health=burn_in"
    settings = (*FAST, *CALM)


def row(rank: int, node: str = "a", **more) -> RankRates:
    peers = {str(peer): 10e9 for peer in range(8) if peer != rank}
    usual = {"matmul": 100e12, "small_matmul": 50e12, "memory": 2e12, "latency": 1e-5, "memory_bytes": 8e10}
    return RankRates(rank=rank, node=node, **{**usual, "sent": peers, **more})


def test_burn_in_finds_bad_ranks_and_slow_links() -> None:
    rows = [row(rank, "a" if rank < 4 else "b") for rank in range(8)]
    assert find_bad_ranks(rows, BurnInHealth(), on_cpu=False) == []
    rows[3] = row(3, matmul=80e12)
    rows[5] = row(5, "b", wrong=("a matmul",))
    rows[6] = row(6, "b", sent=dict.fromkeys(rows[6].sent, 4e9))
    found = {one.rank: one.why for one in find_bad_ranks(rows, BurnInHealth(), on_cpu=False)}
    assert sorted(found) == [3, 5, 6]
    assert found[3] == ("matmul 80 TFLOP/s, the median is 100",)
    assert found[5] == ("wrong result of a matmul",)
    assert [why.split(",")[0] for why in found[6]] == ["sends 4 GB/s within its node", "sends 4 GB/s to other nodes"]
    assert [one.rank for one in find_bad_ranks(rows, BurnInHealth(), on_cpu=True)] == [5], (
        "ranks on a CPU share its cores"
    )
    rows[1] = row(1, sent={**rows[1].sent, "2": 1e9})
    assert find_slow_links(rows, BurnInHealth(), on_cpu=False) == ["rank 1 to rank 2: 1 GB/s, the median is 10"]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
def test_plan_rounds_pairs_all_ranks_once(size: int) -> None:
    found = measure.plan_rounds(size, 16)
    pairs = [(rank, peer) for peers in found for rank, peer in enumerate(peers) if peer is not None and rank < peer]
    assert sorted(pairs) == [(a, b) for a in range(size) for b in range(a + 1, size)]
    assert all(peers[peer] == rank for peers in found for rank, peer in enumerate(peers) if peer is not None)
    assert len(measure.plan_rounds(10_000, 16)) == 5, "of many ranks each meets a few"


def test_burn_in_detects_wrong_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, mm = torch.device("cpu"), torch.mm
    assert measure.is_matmul_exact(cpu, torch.float32)
    assert measure.is_matmul_exact(cpu, torch.bfloat16)

    def flips(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = mm(a, b)
        found.view(torch.int32)[3, 4] ^= 1
        return found

    monkeypatch.setattr(torch, "mm", flips)
    assert not measure.is_matmul_exact(cpu, torch.float32)


@pytest.mark.parametrize("size", [1, 181, 16_384])
def test_burn_in_detects_wrong_all_reduce(size: int) -> None:
    cpu = torch.device("cpu")

    class Ranks:
        """Comm of rank 2 of `size` ranks, or of the only rank. Rank r contributes (r + 1) times the same numbers."""

        def __init__(self, off: float = 0.0) -> None:
            self.size, self.index, self.off = size, min(size - 1, 2), off

        def all_reduce(self, mine: torch.Tensor) -> torch.Tensor:
            found = torch.zeros_like(mine)
            for rank in range(size):
                found += mine / (self.index + 1) * (rank + 1)
            found[5] += self.off
            return found

    assert is_all_reduce_exact(cast(Any, Ranks()), cpu)
    assert not is_all_reduce_exact(cast(Any, Ranks(off=1.0)), cpu)


def burnt_in(run_dir: Path, bad: int | None) -> tuple[int, int]:
    """Train with burn-in and return (exit code, steps done). bad: rank whose matmuls are not exact."""
    s = open_session(run_dir, "health=[burn_in]", "parallel=ddp", "run.steps=2", *FAST, *CALM)
    exact = measure.is_matmul_exact
    if s.comms.rank == bad:
        measure.is_matmul_exact = lambda *_: False  # type: ignore[assignment]
    try:
        return train(s), s.step
    finally:
        measure.is_matmul_exact = exact


def test_bad_rank_stops_run_before_first_step(tmp_path: Path) -> None:
    assert get_pool(4).run(burnt_in, tmp_path / "bad", 1) == [(3, 0)] * 4
    found = [line for line in read_events(tmp_path / "bad") if line.get("kind") == "burn-in"]
    wrong = "wrong result of an integer matmul"  # a busy machine may add verdicts on slow ranks
    (verdict,) = [line for line in found if wrong in line["evidence"]]
    assert (verdict["where"], verdict["details"]["rank"]) == ("rank 1", 1)


def test_burn_in_writes_cluster_file_only_once(tmp_path: Path) -> None:
    assert get_pool(2).run(burnt_in, tmp_path / "out", None) == [(0, 2)] * 2
    place = tmp_path / "out" / "logs" / "burn-in.json"
    rows = json.loads(place.read_text())["ranks"]
    assert [row["rank"] for row in rows] == [0, 1]
    assert all(row["matmul"] > 1e6 and row["sent"] and row["all_reduce"] > 0 for row in rows)
    cluster = load_cluster(str(tmp_path / "out" / "cluster.yaml"))
    assert cluster["peak.bf16"] == pytest.approx((rows[0]["matmul"] + rows[1]["matmul"]) / 2)
    assert cluster.topology.gpus_per_node == 2
    assert cluster.numbers["peak.bf16"].source.startswith("measured by burn-in")
    assert cluster.numbers["overlap.share"].source.startswith("not measured; from h100_ib")
    assert cluster.get("price.hour") is None, "nothing is invented"
    before = place.read_text()
    assert get_pool(2).run(burnt_in, tmp_path / "out", None) == [(0, 2)] * 2
    assert place.read_text() == before, "at a restart on the same nodes nobody waits for it again"


def test_invalid_options_are_refused() -> None:
    with pytest.raises(UserError, match="must be less than 1"):
        check(build_small_run("health=[burn_in]", "health.burn_in.matmul=1.5"))
    with pytest.raises(UserError, match="cluster=nowhere does not exist"):
        check(build_small_run("health=[burn_in]", "health.burn_in.base=nowhere"))


def commanded(runs: RealRuns, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start `gangline health burn-in --json WORDS`."""
    runs.settings = ()
    variables = runs._make_variables(environment)
    asked = ("health", "burn-in", "--json", *words, *FAST, *CALM)
    return runs._start(warm.make_command("gangline.cli.main", variables), asked, variables)


def test_command_measures_ranks_and_writes_cluster(tmp_path: Path) -> None:
    """Check also the number of processes, which defaults to the number that the strategy requests."""
    with RealRuns(tmp_path) as runs:
        printed = runs.finish(commanded(runs, "run.dir=out"))
    found = json.loads(printed[printed.index("{\n") :])
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert found["bad"] == []
    assert load_cluster(str(tmp_path / found["cluster"])).about.startswith("2 ranks on 1 nodes, cpu")


NODES = ("launch=elastic", "launch.nodes=1:2", "launch.agents=1", "launch.processes=2", "launch.lost_seconds=60")


def test_command_on_two_nodes_reports_all_ranks(tmp_path: Path) -> None:
    """Check that both nodes are one run: each reports the ranks of both nodes."""
    with RealRuns(tmp_path) as runs:
        each = [commanded(runs, "run.dir=out", *NODES, GANGLINE_NODE=f"127.0.0.{n}") for n in (1, 2)]
        printed = [runs.finish(process) for process in each]
    for text in printed:
        found = json.loads(text[text.index("{\n") :])
        assert [(row["rank"], row["node"]) for row in found["ranks"]] == [(0, "127.0.0.1"), (1, "127.0.0.2")]
        assert all(row["to_others"] > 0 for row in found["ranks"])


def test_command_refuses_resume_and_nodes_without_run_dir() -> None:
    with pytest.raises(UserError, match=r"the nodes cannot find each other without run\.dir"):
        run(["launch=elastic", "launch.nodes=2", "launch.agents=1", "launch.processes=2"])
    with pytest.raises(UserError, match="resume=runs/a is not supported: burn-in starts a new run"):
        run(["resume=runs/a"])


@pytest.mark.parametrize(("nodes", "size"), [("2", 4), ("2:3", 12), ("1:3", 12), ("6:7", 84)])
def test_batch_divides_over_every_node_count(nodes: str, size: int) -> None:
    words = ["parallel=ddp", "launch=elastic", f"launch.nodes={nodes}", "launch.per_node=2"]
    most = int(nodes.rpartition(":")[2])
    assert choose_global_size(compose_one([*words, f"launch.processes={2 * most}"])) == size
