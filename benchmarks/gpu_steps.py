"""Measure full steps on the device: host waits by source line, kernels by time, and `train` from the shell."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_places import Place, Trainer, small
from gpu_rates import of_8b, of_30b_a3b

from gangline.config.schema import Run

ROOT = Path(__file__).resolve().parent.parent

# name -> (settings of the run, kind of the samples)
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "dense": ((), "whole"),
    "documents": ((), "documents"),
    "window": (("model.window=8",), "whole"),
    "fp8": (("precision=fp8",), "whole"),
    "muon": (("optimizer=muon",), "whole"),
    "fsdp": (("parallel=fsdp",), "whole"),
    "offload": (("parallel=fsdp", "parallel.offload=true"), "whole"),
    "experts": (("moe=on", "moe.experts=4"), "whole"),
    "experts with capacity": (("moe=on", "moe.experts=4", "moe.capacity_factor=1.5"), "whole"),
    "deterministic AdamW": (("run.deterministic=true",), "whole"),
}


def waits(place: Place) -> str:
    """Count the host's waits for the device in a step of each kind; the source lines of the waits go to a file."""
    place.needs_cuda("a wait for the device")
    table = []
    said = []
    for name, (words, kind) in KINDS.items():
        try:
            deterministic = () if "deterministic" in name else ("run.deterministic=false",)
            run = small("precision=bf16", *deterministic, *words)
            trainer = Trainer.of(run, place.device, drawn=False)
            for number in range(2):
                trainer.step(number, kind)
            found = counted_waits(place, lambda trainer=trainer, kind=kind: trainer.step(2, kind))  # type: ignore[misc]
        except Exception as error:
            said.append(f"{name}: {type(error).__name__} {str(error)[:80]}")
            table += [f"== {name}: failed", traceback.format_exc()]
            continue
        said.append(f"{name} {sum(found.values())}")
        table += [f"== {name}", *(f"{count:4d}  {where}" for where, count in found.most_common())]
    place.write("waits.txt", "\n".join(table))
    return ", ".join(said)


def counted_waits(place: Place, work: Callable[[], object]) -> Counter[str]:
    """Return the number of waits of `work` for the device, by the innermost source lines of this repository."""
    found: Counter[str] = Counter()

    def note(message: Warning | str, *about: object, **more: object) -> None:
        if "synchroniz" not in str(message).lower():
            return
        stack = [f for f in traceback.extract_stack() if "/packages/" in f.filename or "gpu_places" in f.filename]
        found[" < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(stack[-3:]))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown, warnings.showwarning = warnings.showwarning, note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown
    return found


def profiled(name: str, run_of: Callable[[Place], Run]) -> Callable[[Place], str]:
    """Return a measurement of a step: host and device seconds; a file lists the kernels by time."""

    def rate(place: Place) -> str:
        run = run_of(place)
        trainer = Trainer.of(run, place.device, drawn=False)
        for number in range(2):
            trainer.step(number, "whole")
        trainer.prepare(2, 4, "whole")
        place.wait()
        began = time.perf_counter()
        trainer.step(2, "whole")
        queued = time.perf_counter() - began
        place.wait()
        whole = time.perf_counter() - began
        kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * place.cuda
        with torch.profiler.profile(activities=kinds) as profile:
            trainer.step(3, "whole")
            place.wait()
        events = profile.key_averages()
        place.write(
            f"profile-{name}.txt",
            events.table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=110),
        )
        device_events = [e for e in events if str(e.device_type).endswith("CUDA")]
        busy = sum(e.self_device_time_total for e in device_events) / 1e6
        count = sum(e.count for e in device_events)
        return f"step {1e3 * whole:.4g} ms, host {1e3 * queued:.4g} ms, {count} kernels in {1e3 * busy:.4g} ms"

    return rate


def dense(*words: str) -> Callable[[Place], Run]:
    return lambda place: of_8b(place, "precision=bf16", *words)


def experts(*words: str) -> Callable[[Place], Run]:
    return lambda place: of_30b_a3b(place, "precision=bf16", *words)


def train(compiled: bool) -> Callable[[Place], str]:
    """Return a measurement of `train` from the shell: a full model, documents, readers, metrics, a save at the end."""

    def rate(place: Place) -> str:
        with tempfile.TemporaryDirectory() as folder:
            sizes = (
                ["model=llama3-1b", "model.layers=8", "batch.sequence_length=4096", "batch.global_size=16"]
                if not place.tiny
                else ["recipe=quick"]
            )
            words = [
                *sizes,
                "batch.micro_size=2",
                "precision=bf16",
                f"run.steps={16 if not place.tiny else 4}",
                f"run.compile={str(compiled).lower()}",
                "run.deterministic=false",
                "run.sample=0",
                f"run.dir={folder}/out",
                "track=[jsonl]",
            ]
            command = [sys.executable, "-m", "gangline.cli.train", *words]
            ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=110)
            name = f"train{'-compiled' * compiled}"
            place.write(f"{name}.txt", ran.stdout + ran.stderr)
            assert ran.returncode == 0, (ran.stderr + ran.stdout)[-400:]
            log = next(Path(folder).glob("out/**/metrics*.jsonl")).read_text()
            place.write(f"{name}.jsonl", log)
            records = [json.loads(line) for line in log.splitlines()]
            return told([record for record in records if "step_seconds" in record])

    return rate


def told(records: list[dict[str, Any]]) -> str:
    """Return the medians of the later half of the steps, and values of the last step, as text."""
    later = records[len(records) // 2 :]
    median = {name: statistics.median(r[name] for r in later) for name in ("step_seconds", "tokens_per_second", "mfu")}
    phases = {name: statistics.median(r["seconds"].get(name, 0.0) for r in later) for name in later[-1]["seconds"]}
    return (
        f"{len(records)} steps, {median['tokens_per_second']:,.0f} tokens/s, MFU {median['mfu']:.1%}, "
        f"{1e3 * median['step_seconds']:.4g} ms ({', '.join(f'{k} {1e3 * v:.3g}' for k, v in phases.items())}), "
        f"first step {records[0]['step_seconds']:.3g} s, loss {records[0]['loss']:.4g} to {later[-1]['loss']:.4g}, "
        f"{later[-1]['memory_bytes'] / 1e9:.3g} GB"
    )


RATES: dict[str, Callable[[Place], str]] = {
    "host waits": waits,
    "profile, 8B blocks": profiled("dense", dense()),
    "profile, 30B-A3B blocks": profiled("experts", experts()),
    "train": train(False),
}
COMPILED: dict[str, Callable[[Place], str]] = {
    "profile, 8B blocks, compiled": profiled("dense-compiled", dense("run.compile=true")),
    "profile, 30B-A3B blocks, compiled": profiled("experts-compiled", experts("run.compile=true")),
    "train, compiled": train(True),
}
