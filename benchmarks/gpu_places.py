"""Provide the device of the checks and measurements of `gpu.py`, and shared models, steps and comparisons."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gangline.comm.transport import connect
from gangline.config.schema import Run
from gangline.mesh import Mesh
from gangline.run.directory import RunDirectory
from gangline.train.build import build as build_session
from gangline.train.session import Session
from gangline_testkit.runs import build_small_run
from gangline_testkit.trainer import Trainer

CPU = torch.device("cpu")


class LeftOut(Exception):
    """Raised for a check or a measurement that this machine does not support."""


@dataclass(frozen=True)
class Place:
    """A device, whether sizes are small, and a folder for output that is longer than a line."""

    device: torch.device
    tiny: bool
    out: Path | None = None

    @classmethod
    def of(cls, name: str | None, tiny: bool, out: Path | None = None) -> Place:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        return cls(torch.device("cuda", device.index or 0) if device.type == "cuda" else device, tiny, out)

    def __str__(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.cuda else "CPU"
        return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}" + ", tiny sizes" * self.tiny

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def needs_cuda(self, what: str) -> None:
        if not self.cuda:
            raise LeftOut(f"{what} needs a GPU")

    def sized(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def write(self, name: str, text: str) -> None:
        """Write a file into the output folder, if there is one."""
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_text(text)

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Free unused memory of the device."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], object], repeats: int = 10, warm: int = 3) -> float:
        """Return the median seconds of `work`, each repeat with its device work."""
        repeats, warm = (2, 1) if self.tiny else (repeats, warm)
        for _ in range(warm):
            work()
        found = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - start)
        return statistics.median(found)


# --- comparisons -----------------------------------------------------------------------------------------------------


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Return |ours - theirs| / |theirs| over all elements, in float64; inf if shapes differ or `ours` is not finite."""
    if ours.shape != theirs.shape or not bool(ours.isfinite().all()):
        return float("inf")
    ours, theirs = ours.detach().to(CPU, torch.float64), theirs.detach().to(CPU, torch.float64)
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300))


def within(found: dict[str, float], bound: float) -> str:
    """Return the largest difference as text. Raises AssertionError if it is above the bound."""
    name, worst = max(found.items(), key=lambda item: item[1])
    assert worst <= bound, f"{name}: relative difference {worst:.2g}, above the rounding bound {bound:.2g}"
    return f"largest difference {worst:.2g} ({name}), bound {bound:.2g}"


def numbers(name: str, ours: Iterable[float], theirs: Iterable[float]) -> dict[str, float]:
    """Return the relative differences of two sequences of numbers, by step."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return {f"{name} of step {i + 1}": abs(a - b) / max(abs(b), 1e-300) for i, (a, b) in pairs}


# --- steps -----------------------------------------------------------------------------------------------------------


SMALL = (
    "model.layers=2",
    "model.dim=64",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_dim=96",
    "model.vocab_size=256",
    "batch.global_size=4",
    "batch.micro_size=2",
    "batch.sequence_length=32",
    "checkpoint=off",
)


def small(*words: str) -> Run:
    """Return a run of a small decoder."""
    return build_small_run(*SMALL, *words)


def trained(place: torch.device, *words: str, kind: str = "ragged") -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of three steps in one process."""
    return Trainer.of(small(*words), place).run_steps(kind=kind)


def compared(
    ours: tuple[list[float], list[float]], theirs: tuple[list[float], list[float]], bound: float, what: str = ""
) -> str:
    """Return the largest difference of losses and gradient norms as text, like `within`."""
    found = numbers(f"{what}loss", ours[0], theirs[0]) | numbers(f"{what}gradient norm", ours[1], theirs[1])
    return within(found, bound)


def session(run: Run, device: torch.device) -> Session:
    """Return the session of a run in this process, as `train` builds it in a rank."""
    mesh = Mesh.of({})
    directory = RunDirectory.open(str(run.job.dir))
    return build_session(run, directory, mesh, connect(mesh, device=device, deterministic=run.deterministic), device)
