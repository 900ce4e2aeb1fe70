"""Conformance kit for plugins: a suite class per hook, a pool of forked ranks for multi-rank tests, and real runs.

An author subclasses a suite in five lines, and claims the capabilities of the part:

    from gangline_testkit import CheckpointerSuite

    class TestMine(CheckpointerSuite):
        choice = "checkpoint=mine"
        can = {"reshard", "atomic"}

Importing this package loads none of its modules. Each module is loaded on the first use of one of its names.
"""

import sys
from importlib import import_module
from typing import Any

_WHERE = {
    "CallbackSuite": "callback",
    "CheckpointerSuite": "checkpointer",
    "CommandSuite": "command",
    "DataSourceSuite": "data",
    "FLOAT32": "scenarios",
    "FLOAT64": "scenarios",
    "GradientsSuite": "gradients",
    "HealthCheckSuite": "health",
    "LAYOUT": "claims",
    "LAYOUT_CLAIM": "claims",
    "RunLayout": "scenarios",
    "ModelEditSuite": "edit",
    "OptimizerSuite": "optimizer",
    "PartSuite": "suite",
    "PrecisionSuite": "precision",
    "RealRuns": "real_runs",
    "Scenario": "scenarios",
    "ScheduleSuite": "schedule",
    "SimulatorSuite": "simulator",
    "StrategySuite": "strategy",
    "TrackerSuite": "tracker",
    "as_installed": "install",
    "count_saved_bytes": "saved_bytes",
    "get_pool": "pool",
    "list_readable": "figures",
    "list_tips": "figures",
    "list_words": "figures",
    "mark_capability": "claims",
    "waive": "claims",
}

__all__ = [*_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _show_what_asserts_compare()
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def _show_what_asserts_compare() -> None:
    """Make pytest rewrite the asserts of the suites as in a test file, so that a failure shows the compared values."""
    import pytest

    names = {f"{__name__}.{module}" for module in _WHERE.values()} - set(sys.modules)
    pytest.register_assert_rewrite(*names)
