"""Conformance suites of the testkit, run on `health=monitors` and `simulator=events`."""

from __future__ import annotations

from gangline_testkit import HealthCheckSuite, SimulatorSuite


class TestOn(HealthCheckSuite):
    choice = "health=monitors"
    can = {"not-finite", "loss-spike", "gradient-spike", "divergence"}


class TestEvents(SimulatorSuite):
    choice = "simulator=events"
