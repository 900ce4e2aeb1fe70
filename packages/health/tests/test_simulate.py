"""`gangline health simulate` and `simulator=events`: simulated failures against the closed forms."""

from __future__ import annotations

import json
import time

import pytest

from gangline import UserError
from gangline.config.check import check
from gangline.explain.reliability import Reliability, SimulatedJob, build_simulator
from gangline_health.commands.simulate import format_simulation, run, simulate_courses
from gangline_health.simulate import EventSimulator
from gangline_testkit.runs import build_small_run

JOBS = {
    "a thousand GPUs": SimulatedJob(nodes=128, days=300, save_seconds=60, restart_seconds=600, spares=99),
    "Llama 3": SimulatedJob(nodes=2048, days=54, faults_per_node_day=3.79e-3, spares=99, repair_seconds=3600),
    "memory tier": SimulatedJob(nodes=2048, days=54, save_seconds=0.2, restart_seconds=30, spares=99),
    "many faults": SimulatedJob(nodes=12_500, days=30, save_seconds=5, restart_seconds=180, spares=500),
}


@pytest.mark.parametrize("name", JOBS)
def test_simulation_matches_closed_form(name: str) -> None:
    found = simulate_courses(JOBS[name], 20)
    assert found["ettr"] == pytest.approx(found["closed_form"]["ettr"], rel=0.03)
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"], rel=1e-9)
    expected = found["wall_seconds"] / found["closed_form"]["mtbf_seconds"]
    assert found["faults"] == pytest.approx(expected, rel=0.1)


def test_young_daly_interval_is_optimal() -> None:
    model = Reliability(3600.0, 30.0, 120.0)
    best = max((model.compute_ettr(every), every) for every in range(30, 3600, 5))
    assert model.compute_young_daly() == pytest.approx(best[1], rel=0.1)
    assert model.compute_ettr(model.compute_young_daly()) == pytest.approx(best[0], rel=1e-3)


def test_optimal_interval_matches_youngs_formula() -> None:
    """Check M = 7.9 h and w = 60 s: Young's sqrt(2 w M) includes the save, which the interval excludes."""
    assert Reliability(7.9 * 3600, 60.0, 0.0).compute_young_daly() == pytest.approx(1847 - 60, abs=2)


def test_without_spares_a_job_waits_for_repairs() -> None:
    job = SimulatedJob(nodes=1000, days=10, spares=0, repair_seconds=7200)
    found = simulate_courses(job, 3)
    assert found["seconds"]["idle"] > 10 * 3600
    assert found["ettr_without_idle"] == pytest.approx(found["closed_form"]["ettr"], rel=0.05)
    told = format_simulation(found).splitlines()
    assert f"ETTR {found['ettr_without_idle']:.2%} (closed form" in told[1]
    assert told[2].startswith(f"ETTR {found['ettr']:.2%} over all time: ")
    assert told[2].endswith(" h for nodes, with --spares 0 and --repair-seconds 7200")
    assert (
        found["ettr"] < simulate_courses(SimulatedJob(nodes=1000, days=10, spares=50, repair_seconds=7200), 3)["ettr"]
    )


def test_simulation_depends_only_on_seed() -> None:
    job = SimulatedJob(nodes=100, days=100)
    assert simulate_courses(job, 2) == simulate_courses(job, 2)
    assert simulate_courses(job, 2) != simulate_courses(SimulatedJob(nodes=100, days=100, seed=7), 2)


def test_simulation_of_100000_gpus_is_fast(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert run(["--nodes", "12500", "--days", "30", "--spares", "200", "--json"]) == 0
    assert time.process_time() - began < 30
    found = json.loads(capsys.readouterr().out)
    assert found["faults"] > 1000
    assert run(["--nodes", "12500", "--days", "30"]) == 0
    assert "closed form" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nodes 0 --days 30", "--nodes 0"),
        ("--nodes 100000000 --days 30", "too many to simulate"),
        ("--nodes 1000000000 --days 0.0001", "makes no progress"),
        ("--nodes 8 --days inf", "--days inf"),
        ("--nodes 8 --days nan", "--days nan"),
        ("--nodes 8 --days 1 --save-seconds nan", "--save-seconds nan"),
        ("--nodes 8 --days 1 --restart-seconds -1", "0 or more"),
        (f"--nodes {10**400} --days 1", "--nodes 1000"),
    ],
)
def test_invalid_job_arguments_are_refused(words: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        run(words.split())
    assert said in str(caught.value)


def test_a_simulator_is_chosen_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "64", "--days", "10", "--json"]
    assert run([*words, "--simulator", "events"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out) == named
    assert type(build_simulator("events")) is EventSimulator
    with pytest.raises(UserError, match="Installed choices for simulator: events"):
        run([*words, "--simulator", "oracle"])


def test_run_refuses_a_simulator() -> None:
    with pytest.raises(UserError, match="Only gangline commands use the group"):
        check(build_small_run("model.vocab_size=256", "simulator=events"))
