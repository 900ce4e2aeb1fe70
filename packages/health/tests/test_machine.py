"""`health.monitors.machine`: GPU and host probes with a fake NVML, without NVML, and with a hung probe."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gangline.health import Verdict
from gangline_health.config import MachineOptions
from gangline_health.gpus import Gpus, has_gpus
from gangline_health.monitors.machine import MachineMonitor
from gangline_health.probes import Finding, Probe, check_descriptors, check_disk, check_memory
from gangline_testkit.health import make_healthy


class Refused(Exception):
    """Base class of NVML errors."""


class NotSupported(Refused):
    """NVML error for a feature that the GPU does not support."""


class TimedOut(Refused):
    """NVML error for a wait that ends without an event."""


class Lost(Refused):
    """NVML error for a GPU that has fallen off the bus."""


class FakeNvml(SimpleNamespace):
    """NVML of two GPUs with two links each, with the calls that a probe makes. Arguments set the reported values."""

    NVMLError, NVMLError_GpuIsLost, NVMLError_Timeout = Refused, Lost, TimedOut
    NVMLError_NotSupported = NVMLError_InvalidArgument = NVMLError_NoPermission = NotSupported
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 1, 0, 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, NVML_CLOCK_SM = 1, 1
    NVML_NVLINK_MAX_LINKS, nvmlEventTypeXidCriticalError = 36, 8
    NVML_NVLINK_ERROR_DL_CRC_FLIT, NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 2, 0, 1
    nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x40, 0x80

    def __init__(self, **said: Any) -> None:
        usual = {"errors": (0, 0), "remapped": (0, 0, 0, 0), "reasons": 0, "ecc": True, "xids": [], "degrees": 60,
                 "clock": 1900, "links": {(0, 0), (0, 1), (1, 0), (1, 1)}, "crc": {}, "lost": {},
                 "events": True}  # fmt: skip
        super().__init__(**{**usual, **said})

    def nvmlInit(self) -> None: ...
    def nvmlEventSetCreate(self) -> str:
        if not self.events:
            raise NotSupported
        return "set"

    def there(self, handle: int) -> None:
        """Raise the error in `lost` of a GPU that is lost or has another fault."""
        if handle in self.lost:
            raise self.lost[handle]

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert (kinds, events) == (8, "set")

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> SimpleNamespace:
        assert (events, milliseconds) == ("set", 0), "the probe must not wait"
        if not self.xids:
            raise TimedOut
        return SimpleNamespace(eventData=self.xids.pop(0), device=1)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        self.there(handle)
        return f"GPU-{handle}"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        self.there(number)
        return number

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0), "uncorrected, volatile"
        self.there(handle)
        if not self.ecc:
            raise NotSupported
        return self.errors[handle]

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, ...]:
        return self.remapped

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.reasons

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self.degrees

    def nvmlDeviceGetTemperatureThreshold(self, handle: int, which: int) -> int:
        return 87

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 650_000

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        return self.clock

    def nvmlDeviceGetMaxClockInfo(self, handle: int, which: int) -> int:
        return 1980

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=99, memory=50)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link > 1:
            raise NotSupported
        return int((handle, link) in self.links)

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: int, link: int, counter: int) -> int:
        return self.crc.get((handle, link), 0) if counter == 2 else 0


def gpus(nvml: FakeNvml) -> list[str]:
    return said_by(Gpus(nvml))


def said_by(asked: Gpus) -> list[str]:
    return [finding.text for finding in asked()]


def nvml(**said: Any) -> FakeNvml:
    return FakeNvml(**said)


def test_gpu_probe_reports_nvml_defects() -> None:
    assert gpus(nvml()) == []
    assert gpus(nvml(errors=(0, 3))) == ["GPU 1 has 3 uncorrected ECC errors"]
    assert len(gpus(nvml(remapped=(0, 2, 1, 0)))) == 2
    assert "could not be remapped" in gpus(nvml(remapped=(0, 2, 0, 1)))[0]
    assert "91 degrees C, 650 W" in gpus(nvml(reasons=0x44, degrees=91))[0]
    assert gpus(nvml(degrees=88))[0] == "GPU 0 is at 88 degrees C and slows down from 87 degrees C on"
    assert gpus(nvml(reasons=0x4)) == [], "a power cap is no defect"
    assert gpus(nvml(errors=(9, 9), ecc=False)) == []
    assert gpus(nvml(clock=700)) == [
        f"GPU {number} is busy, but its SM clock is only 700 of 1980 MHz" for number in (0, 1)
    ]


def test_hardware_xids_are_reported_once() -> None:
    fake = nvml(xids=[79, 13, 31, 74, 999])
    asked = Gpus(fake)
    said = ["Xid 79 (fallen off the bus)", "Xid 74 (NVLink error)", "Xid 999"]
    assert said_by(asked) == [f"GPU GPU-1 reported {what}" for what in said]
    assert said_by(asked) == []


@pytest.mark.parametrize("late", [True, False])
def test_lost_gpu_hides_no_other_defect(late: bool) -> None:
    """Check a GPU that is lost during the run (`late`), or before the first probe."""
    fake = nvml(errors=(0, 0, 3), links=set())
    fake.nvmlDeviceGetCount = lambda: 3
    asked = Gpus(fake)
    if late:
        assert said_by(asked) == ["GPU 2 has 3 uncorrected ECC errors"]
    fake.xids, fake.lost = [79], {1: Lost()}
    said = ["GPU 1 is lost: the GPU has fallen off the bus", "GPU 2 has 3 uncorrected ECC errors"]
    assert said_by(asked) == [*said, "a GPU reported Xid 79 (fallen off the bus)"]
    assert said_by(asked) == said
    fake.lost = {1: Refused("Unknown Error")}
    assert said_by(asked) == ["GPU 1 does not answer NVML (Unknown Error)", "GPU 2 has 3 uncorrected ECC errors"]


def test_probe_without_nvml_events_reads_counters() -> None:
    asked = Gpus(nvml(events=False, errors=(0, 3)))
    assert [said_by(asked) for _ in range(2)] == [["GPU 1 has 3 uncorrected ECC errors"]] * 2


def test_nvlink_changes_since_start_are_reported() -> None:
    fake = nvml(crc={(0, 1): 7}, links={(0, 0), (0, 1), (1, 0)})
    asked = Gpus(fake)
    assert said_by(asked) == [], "what was before is nobody's news, and a link that never was is not lost"
    fake.crc = {(0, 1): 12}
    fake.links = {(0, 1), (1, 0)}
    assert said_by(asked) == ["GPU 0 has lost its NVLink 0", "GPU 0 has 5 new CRC errors on NVLink 1"]


def test_fake_nvml_names_exist_in_pynvml() -> None:
    real = importlib.import_module("pynvml")
    for name in {name for owner in (FakeNvml,) for name in vars(owner) if "nvml" in name.lower() and name[0] != "_"}:
        assert hasattr(real, name), name
    grows = "NVML_NVLINK_MAX_LINKS"
    values = [name for name, value in vars(FakeNvml).items() if isinstance(value, int) and name != grows]
    assert {name: getattr(real, name) for name in values} == {name: getattr(FakeNvml, name) for name in values}


def test_low_memory_disk_or_descriptors_are_reported() -> None:
    assert (check_memory(0.0), check_disk("/", 0.0), check_descriptors(1.0)) == ([], [], [])
    assert check_memory(1.0)[0].text.endswith("of the machine's memory is available")
    assert "of the disk of / is free" in check_disk("/", 1.0)[0].text
    assert "file descriptors are open" in check_descriptors(0.0)[0].text


def settled(probe: Probe) -> None:
    deadline = time.monotonic() + 60
    while probe.why == "not probed yet" and time.monotonic() < deadline:
        probe.poll()
        time.sleep(0.01)


def test_failing_or_hung_probe_is_unknown() -> None:
    broken = Probe("gpus", lambda: 1 / 0, 1e9, 10.0)  # type: ignore[arg-type,return-value]
    settled(broken)
    assert (broken.findings, broken.why) == (None, "ZeroDivisionError: division by zero")
    free = threading.Event()
    hangs = Probe("driver", lambda: [Finding("", "")] * (not free.wait(300)), 0.0, 0.05)
    settled(hangs)
    assert (hangs.findings, hangs.why) == (None, "no answer within 0.05 s")
    free.set()
    deadline = time.monotonic() + 60
    while hangs.findings is None and time.monotonic() < deadline:
        hangs.poll()
        time.sleep(0.01)
    assert hangs.findings == [], "it answered after all"


def test_gpu_errors_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline_health.monitors.machine.has_gpus", lambda: True)
    monkeypatch.setattr("gangline_health.monitors.machine.Gpus", lambda: Gpus(nvml(errors=(0, 3))))
    monitor = MachineMonitor(MachineOptions(seconds=0.001, memory=0, disk=0, descriptors=1), "/")
    monitor.attach(cast(Any, None), cast(Any, SimpleNamespace(rank=5)), None, cast(Any, None))
    assert monitor.describe() == "descriptors, memory, disk, gpus"
    said: list[Verdict] = []
    deadline, more = time.monotonic() + 60, 20  # more: number of records after the verdict
    for record in make_healthy(6000):
        said += monitor.observe(record)
        more -= bool(said)
        if not more or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    (verdict,) = said
    assert (verdict.kind, verdict.details["probe"]) == ("machine", "gpus")
    assert "3 uncorrected ECC errors" in verdict.evidence
    assert verdict.details["exclude"] == "rank 5", "the launcher may have another name for the machine"


def test_same_defect_on_another_gpu_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = nvml(errors=[0, 3])
    monkeypatch.setattr("gangline_health.monitors.machine.has_gpus", lambda: True)
    monkeypatch.setattr("gangline_health.monitors.machine.Gpus", lambda: Gpus(fake))
    monitor = MachineMonitor(MachineOptions(seconds=0.001, memory=0, disk=0, descriptors=1), "/")
    monitor.attach(cast(Any, None), cast(Any, SimpleNamespace(rank=5)), None, cast(Any, None))

    def heard(until: int, said: list[str]) -> list[str]:
        deadline, more = time.monotonic() + 60, 20
        while more and time.monotonic() < deadline:
            said += [verdict.evidence for verdict in monitor.observe(make_healthy(1)[0])]
            more -= len(said) >= until
            time.sleep(0.01)
        return said

    said = heard(1, [])
    fake.errors[1] = 4
    heard(1, said)
    fake.errors[0] = 1
    heard(2, said)
    fake.crc = {(0, 0): 5, (0, 1): 6}
    heard(4, said)
    what = ["1 has 3 uncorrected ECC errors", "0 has 1 uncorrected ECC errors"]
    what += ["0 has 5 new CRC errors on NVLink 0", "0 has 6 new CRC errors on NVLink 1"]
    assert said == [f"gpus: GPU {each}" for each in what]


def test_gpus_without_a_driver_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if pynvml was not installed
    monkeypatch.setattr("gangline_health.monitors.machine.has_gpus", lambda: True)
    monitor = MachineMonitor(MachineOptions(), "/")
    assert monitor.explain_unknown().startswith("gpus (")
    assert [v for record in make_healthy(5) for v in monitor.observe(record) if v.details["probe"] == "gpus"] == []


def test_machine_without_gpu_has_no_gpu_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_gpus(str(tmp_path))
    (tmp_path / "nvidiactl").touch()
    assert not has_gpus(str(tmp_path))
    (tmp_path / "nvidia0").touch()
    assert has_gpus(str(tmp_path))
    monkeypatch.setattr("gangline_health.monitors.machine.has_gpus", lambda: False)
    monitor = MachineMonitor(MachineOptions(), "/")
    assert monitor.describe() == "descriptors, memory, disk"
    assert monitor.explain_unknown() == ""


def test_skewed_clock_is_reported() -> None:
    """Check three ranks, of which rank 2 has a clock two seconds ahead."""

    class Three:
        size, index = 3, 2

        def barrier(self) -> None: ...
        def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
            return torch.cat([mine - 2, mine - 2.01, mine])

    monitor = MachineMonitor(MachineOptions(memory=0, disk=0, descriptors=1), "/")
    monitor.attach(cast(Any, None), cast(Any, SimpleNamespace(rank=2)), None, torch.device("cpu"))
    said = []
    for record in make_healthy(4):
        monitor.collective(cast(Any, Three()), record.step)
        said += [verdict for verdict in monitor.observe(record) if verdict.details["probe"] == "clock"]
    (verdict,) = said
    assert verdict.evidence == "the clock of rank 2 is +2.00 s off the median of all ranks"
