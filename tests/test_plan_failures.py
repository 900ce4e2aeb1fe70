"""The course of a planned run, by a part of group `simulator`, beside the closed form."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from gangline import plugins
from gangline.cluster import Quantity, load_cluster
from gangline.discovery import Offer
from gangline.parts import Part, PartConfig
from gangline.reliability import FailureSimulator, SimulatedJob, SimulatedTime
from gangline_planner import failures
from gangline_planner.assumed import explain, planned
from gangline_planner.failures import as_text, simulated
from gangline_planner.forecast import forecast

HUNDRED_THOUSAND = "parallel=ddp launch.processes=98304 batch.global_size=98304 batch.micro_size=1 precision=bf16"


@dataclass
class DiceConfig(PartConfig):
    """Of a simulator that knows nothing but when failures come."""


class Dice(FailureSimulator):
    """Each failure costs the work since the last save, and the way back."""

    def __init__(self, config: DiceConfig, run: object) -> None:
        assert isinstance(config, DiceConfig)

    def simulate(self, job: SimulatedJob) -> SimulatedTime:
        draw, wall, now, kept, faults = random.Random(job.seed), job.days * 86400, 0.0, 0.0, 0
        while now < wall:
            until = min(draw.expovariate(1 / job.reliability.mtbf_seconds), wall - now)
            kept += until // (job.every + job.save_seconds) * job.every
            now += until + job.restart_seconds
            faults += 1
        return SimulatedTime(wall_seconds=wall, seconds={"compute": kept, "lost": wall - kept}, faults=faults)


@pytest.fixture
def plan():
    case, cluster = planned(HUNDRED_THOUSAND.split()), load_cluster("h100_ib")
    cluster = cluster.with_numbers({"storage.bandwidth": Quantity(1e6, "a test: saves take seconds")})
    return forecast(explain(case, case.run, cluster), cluster), case.run


def offered(monkeypatch, parts):
    class Here:
        def offers(self, group: str) -> dict[str, Offer]:
            assert group == "simulator"
            return parts

    monkeypatch.setattr(failures, "installed", Here)


def test_without_a_simulator_there_is_the_closed_form_alone(plan, monkeypatch):
    offered(monkeypatch, {})
    assert simulated(*plan) is None
    assert 0.3 < plan[0].goodput < 0.8  # a failure every half an hour, ten minutes to come back


def test_a_hundred_thousand_gpus_over_thirty_days_are_simulated_beside_the_closed_form(plan, monkeypatch):
    part = Part(name="dice", config=DiceConfig, build="x:y", summary="a test", group="simulator")
    here = plugins.installed().offers("parallel")["ddp"]
    offered(monkeypatch, {"dice": Offer(**{**vars(here), "part": part})})
    monkeypatch.setattr(failures, "build", lambda config, run: Dice(config, run))
    found = simulated(*plan)
    assert found.by == "simulator=dice"
    assert found.days == 30
    assert found.failures == pytest.approx(30 * 24 / (plan[0].reliability.mtbf_seconds / 3600 + 1 / 6), rel=0.1)
    assert found.goodput == pytest.approx(plan[0].goodput, abs=0.04)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert "lost" in as_text(found)
