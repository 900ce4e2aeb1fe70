"""`health=monitors` under torchrun: injected faults are detected, located and answered as under `launch=local`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.run.ending import read_ending
from gangline.run.events import read_events
from gangline_health.ledger.report import build_ledger
from gangline_testkit.real_runs import RealRuns

AGENT = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2")
WORDS = ("parallel=ddp", "run.steps=40", "checkpoint.every=5", "health=[monitors,chaos]", "run.seed=3")
FAULTS = "health.chaos.at=[nan@12:1,stop@20:1,exception@30:0]"


@pytest.mark.nightly
def test_faults_under_torchrun_are_found_and_named(tmp_path: Path) -> None:
    """Check that a step with NaN is skipped, a stopped rank is killed, and a rank that raises is named."""
    with RealRuns(tmp_path) as runs:
        started = runs.start("run.dir=out", *WORDS, FAULTS, agent=AGENT, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        runs.finish(started)
        records = runs.read_records("out")
    out = tmp_path / "out"
    assert [record["step"] for record in records] == list(range(1, 41))
    assert [record["step"] for record in records if record["skipped"]] == [12]
    told = read_events(out)
    found = {line["kind"]: line for line in told if line["event"] == "verdict"}
    assert found["not-finite"]["where"] == "step 12"
    hang = found["hang"]
    assert (hang["where"], hang["details"]["why"], hang["generation"]) == ("rank 1", "stopped", 1)
    launches = [line for line in told if line["event"] == "launch"]
    assert [line["why"] for line in launches] == ["start", "rank", "rank"]
    assert launches[1]["evidence"].startswith("rank 1 failed first: hang: rank 1 (process ")
    assert launches[2]["evidence"] == "rank 0 failed first: RuntimeError: health=chaos: injected exception"
    ending = read_ending(out)
    assert ending is not None
    assert (ending.reason, ending.generation) == ("done", 3)
    of = build_ledger(out)
    assert sum(of.seconds.values()) == pytest.approx(of.wall_seconds, abs=1e-6)
    assert [(fault.kind, fault.named.partition(":")[0]) for fault in of.faults] == [
        ("rank", "rank 1 failed first"),
        ("rank", "rank 0 failed first"),
    ]
    for fault in of.faults:  # torchrun reports no time; a hang is detected after health.monitors.hangs.floor_seconds
        assert 0 <= fault.found < 60
        assert fault.recovery_seconds is not None
    assert of.seconds["detection"] == pytest.approx(sum(fault.found for fault in of.faults), abs=1.0)
