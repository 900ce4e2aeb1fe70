"""Probe of GPU defects by NVML. Torch-free.

It reports uncorrected ECC errors since the driver was loaded, memory rows whose remapping is pending or failed (Meta's
GCM drains a node for either), a clock throttled by heat or power brake, a temperature at the slowdown threshold, and a
slow clock of a busy GPU. It also reports Xid events, NVLink errors and lost NVLinks since the last probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from gangline_health.probes import Finding

# Xids that a faulty program can cause (NVIDIA, "XID Errors": 13, 31, 43, 45, 68, 69), so they prove no GPU defect
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 69})
XIDS = {
    48: "uncorrectable ECC error", 63: "row remapping", 64: "row remapping failed", 74: "NVLink error",
    79: "fallen off the bus", 92: "many correctable ECC errors", 94: "contained ECC error",
    95: "uncontained ECC error", 119: "GSP does not answer", 120: "GSP error", 140: "ECC error",
}  # fmt: skip
COUNTERS = {"CRC": "NVML_NVLINK_ERROR_DL_CRC_FLIT", "replay": "NVML_NVLINK_ERROR_DL_REPLAY",
            "recovery": "NVML_NVLINK_ERROR_DL_RECOVERY"}  # fmt: skip
SLOW_CLOCK = 0.5  # minimum SM clock of a busy GPU, as a share of its maximum clock
BUSY = 90  # minimum utilization of a busy GPU, in percent
MOST_EVENTS = 64  # maximum number of Xid events read per probe


def has_gpus(devices: str = "/dev") -> bool:
    """Return whether this machine has an NVIDIA GPU, by its device files, also under WSL."""
    return any(Path(devices).glob("nvidia[0-9]*")) or Path(devices, "dxg").exists()


class Gpus:
    """Probe of all GPUs of this machine. It stores the error counters of NVLinks, so it reports only new errors."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._count: int | None = None
        self._handles: dict[int, Any] = {}
        self._events: Any = None  # NVML event set; None if the driver does not support events
        self._counted: dict[tuple[int, int, str], int] = {}
        self._active: set[tuple[int, int]] = set()  # (GPU, link) of NVLinks that were up in an earlier probe

    def __call__(self) -> list[Finding]:
        """Return the defects of all GPUs. A GPU that does not answer is a defect; the other GPUs are still probed.

        Raises NVML's error if NVML cannot be initialized, and ImportError without nvidia-ml-py.
        """
        if self._count is None:
            self._count = self._begin()
        findings: list[Finding] = []
        for number in range(self._count):
            try:
                findings.extend(self._find_defects(number))  # defects found before an error are kept
            except self._nvml.NVMLError as error:
                lost = isinstance(error, self._nvml.NVMLError_GpuIsLost)
                what = "is lost: the GPU has fallen off the bus" if lost else f"does not answer NVML ({error})"
                findings.append(Finding(f"GPU {number} does not answer", f"GPU {number} {what}"))
        return [*findings, *self._read_xids()]  # NVML returns an event once, so no call after this may raise

    def _begin(self) -> int:
        """Initialize NVML and return the number of GPUs."""
        nvml = self._nvml = self._nvml or import_module("pynvml")
        nvml.nvmlInit()
        count: int = nvml.nvmlDeviceGetCount()
        with suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
        return count

    def _get_handle(self, number: int) -> Any:
        if number not in self._handles:
            nvml = self._nvml
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            if self._events is not None:
                self._query(nvml.nvmlDeviceRegisterEvents, handle, nvml.nvmlEventTypeXidCriticalError, self._events)
            self._handles[number] = handle
        return self._handles[number]

    def _find_defects(self, number: int) -> Iterator[Finding]:
        handle = self._get_handle(number)
        for kind, what in chain(self._find_memory_defects(handle), self._find_throttling(handle)):
            yield Finding(f"GPU {number} {kind}", f"GPU {number} {what}")
        yield from self._find_link_errors(number, handle)

    def _find_memory_defects(self, handle: Any) -> Iterator[tuple[str, str]]:
        nvml = self._nvml
        kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        if errors := self._query(nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds):
            yield "ECC", f"has {errors} uncorrected ECC errors"
        remapped = self._query(nvml.nvmlDeviceGetRemappedRows, handle)
        if remapped and (remapped[2] or remapped[3]):
            what = "could not be remapped" if remapped[3] else "need a GPU reset to be remapped"
            yield "rows", f"has memory rows that {what} ({remapped[1]} remapped for uncorrected errors)"

    def _find_throttling(self, handle: Any) -> Iterator[tuple[str, str]]:
        nvml = self._nvml
        reasons = self._query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        degrees = self._query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        slow = nvml.nvmlClocksThrottleReasonHwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        threshold = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        hottest = self._query(nvml.nvmlDeviceGetTemperatureThreshold, handle, threshold)
        if reasons & slow:
            watts = (self._query(nvml.nvmlDeviceGetPowerUsage, handle) or 0) / 1000
            yield (
                "held down",
                f"is throttled by its hardware (reasons {reasons:#x}, {degrees} degrees C, {watts:.0f} W)",
            )
        elif degrees and hottest and degrees >= hottest:
            yield "hot", f"is at {degrees} degrees C and slows down from {hottest} degrees C on"
        clock = self._query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        highest = self._query(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
        utilization = self._query(nvml.nvmlDeviceGetUtilizationRates, handle)
        if clock and highest and utilization and utilization.gpu >= BUSY and clock < SLOW_CLOCK * highest:
            yield "slow clock", f"is busy, but its SM clock is only {clock} of {highest} MHz"

    def _find_link_errors(self, number: int, handle: Any) -> Iterator[Finding]:
        """Yield the new errors of each NVLink since the last probe, and each NVLink that is no longer up."""
        nvml = self._nvml
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = self._query(nvml.nvmlDeviceGetNvLinkState, handle, link)
            if state is None:
                return  # this GPU has no more NVLinks
            if state:
                self._active.add((number, link))
            elif (number, link) in self._active:
                yield Finding(f"GPU {number} link {link}", f"GPU {number} has lost its NVLink {link}")
            for name, counter in COUNTERS.items() if state else ():
                count = self._query(nvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, getattr(nvml, counter))
                if count is None:
                    continue
                before = self._counted.setdefault((number, link, name), count)
                self._counted[number, link, name] = count
                if count > before:
                    what = f"GPU {number} has {count - before} new {name} errors on NVLink {link}"
                    yield Finding(f"GPU {number} link {link} {name}", what)

    def _read_xids(self) -> Iterator[Finding]:
        """Yield the Xid events since the last probe. Raises no NVML error."""
        nvml = self._nvml
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # no event is left, or the driver no longer reports events
                return
            xid = int(event.eventData)
            if xid not in OF_PROGRAMS:
                gpu = "a GPU"
                with suppress(nvml.NVMLError):  # a lost GPU no longer has a UUID
                    gpu = f"GPU {nvml.nvmlDeviceGetUUID(event.device)}"
                yield Finding(
                    f"{gpu} Xid {xid}", f"{gpu} reported Xid {xid}" + (f" ({XIDS[xid]})" if xid in XIDS else "")
                )

    def _query(self, call: Callable[..., Any], *arguments: object) -> Any:
        """Return the result of an NVML call; None if the GPU does not support the call or denies access."""
        nvml = self._nvml
        try:
            return call(*arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument, nvml.NVMLError_NoPermission):
            return None
