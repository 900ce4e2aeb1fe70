"""Probes of a machine: with a fake NVML, without any, and one that hangs."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gangline.health import Verdict
from gangline.testing.health import healthy
from gangline_health.config import MachineOptions
from gangline_health.monitors.machine import MachineMonitor
from gangline_health.probes import Probe, descriptors, disk, gpus, memory


class NotSupported(Exception):
    """As NVML says that a GPU lacks something."""


def nvml(errors=(0, 0), remapped=(0, 0, 0, 0), reasons=0, ecc: bool = True) -> SimpleNamespace:
    """NVML of two GPUs, with the calls that a probe makes."""

    def total(handle: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0), "uncorrected, volatile"
        if not ecc:
            raise NotSupported
        return errors[handle]

    return SimpleNamespace(
        NVMLError_NotSupported=NotSupported,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        NVML_TEMPERATURE_GPU=0,
        nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=0x80,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetTotalEccErrors=total,
        nvmlDeviceGetRemappedRows=lambda handle: remapped,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons,
        nvmlDeviceGetTemperature=lambda handle, sensor: 91,
    )


def test_a_fake_nvml_is_read() -> None:
    assert gpus(nvml()) == []
    assert gpus(nvml(errors=(0, 3))) == ["GPU 1 has 3 uncorrected ECC errors"]
    assert len(gpus(nvml(remapped=(0, 2, 1, 0)))) == 2
    assert "could not be remapped" in gpus(nvml(remapped=(0, 2, 0, 1)))[0]
    assert "91 degrees" in gpus(nvml(reasons=0x44))[0]
    assert gpus(nvml(reasons=0x4)) == [], "a power cap is no defect"
    assert gpus(nvml(errors=(9, 9), ecc=False)) == []


def test_limits() -> None:
    assert (memory(0.0), disk("/", 0.0), descriptors(1.0)) == ([], [], [])
    assert memory(1.0)[0].endswith("of the memory is left")
    assert "of the disk under /" in disk("/", 1.0)[0]
    assert "file descriptors are open" in descriptors(0.0)[0]


def settled(probe: Probe) -> None:
    deadline = time.monotonic() + 60
    while probe.why == "not asked yet" and time.monotonic() < deadline:
        probe.poll()
        time.sleep(0.01)


def test_what_raises_or_hangs_is_unknown_and_nobody_waits() -> None:
    broken = Probe("gpus", lambda: 1 / 0, 1e9, 10.0)  # type: ignore[arg-type,return-value]
    settled(broken)
    assert (broken.findings, broken.why) == (None, "ZeroDivisionError: division by zero")
    free = threading.Event()
    hangs = Probe("driver", lambda: [""] * (not free.wait(300)), 0.0, 0.05)
    settled(hangs)
    assert (hangs.findings, hangs.why) == (None, "no answer within 0.05 s")
    free.set()
    deadline = time.monotonic() + 60
    while hangs.findings is None and time.monotonic() < deadline:
        hangs.poll()
        time.sleep(0.01)
    assert hangs.findings == [], "it answered after all"


def test_a_finding_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline_health.monitors.machine.gpus", lambda: gpus(nvml(errors=(0, 3))))
    monitor = MachineMonitor(MachineOptions(seconds=0.001, memory=0, disk=0, descriptors=1), "/")
    monitor.attach(cast(Any, None), cast(Any, SimpleNamespace(rank=5)), None, cast(Any, None))
    assert monitor.watches() == "descriptors, memory, disk, gpus"
    said: list[Verdict] = []
    deadline, more = time.monotonic() + 60, 20  # records after the one at which it is said
    for record in healthy(6000):
        said += monitor.observe(record)
        more -= bool(said)
        if not more or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    (verdict,) = said
    assert (verdict.kind, verdict.details["probe"]) == ("machine", "gpus")
    assert "3 uncorrected ECC errors" in verdict.evidence
    assert verdict.details["exclude"] == "rank 5", "the launcher may have another name for the machine"


def test_without_a_driver_gpus_are_unknown_and_that_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    monitor = MachineMonitor(MachineOptions(), "/")
    assert "unknown: gpus (" in monitor.watches()
    assert [v for record in healthy(5) for v in monitor.observe(record) if v.details["probe"] == "gpus"] == []
