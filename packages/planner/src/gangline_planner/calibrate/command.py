"""Command `gangline plan calibrate`: starts ranks that measure this machine, and writes a cluster file."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from gangline import UserError
from gangline.explain.topology import Topology
from gangline_basics.cluster.file import Cluster, Quantity, save_cluster
from gangline_planner.calibrate.progress import MARK

ASSUMED = {  # values of numbers that are not measured
    "matmul.efficiency": (1.0, "the peak of this file is a measured value"),
    "memory.efficiency": (1.0, "the bandwidth of this file is a measured value"),
    "link.node.efficiency": (1.0, "the bandwidth of this file is a measured value"),
    "link.cluster.efficiency": (1.0, "the bandwidth of this file is a measured value"),
    "overlap.share": (0.5, "assumed: cannot be measured with one process"),
    "jitter.sigma": (0.003, "assumed: cannot be measured with one process"),
    "link.node.bandwidth": (1e9, "assumed: cannot be measured with one process"),
    "link.node.latency": (5e-5, "assumed: cannot be measured with one process"),
}


def calibrate(out: Path, processes: int, rounds: int) -> str:
    """Write the cluster file `out` and return its numbers as text. Raises UserError if ranks fail or `out` exists."""
    if out.exists():
        raise UserError(f"{out} exists already.", "Calibration does not overwrite files.", "--out=ANOTHER.yaml")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is not a directory.")
    threads = count_threads(processes)
    numbers = _measure_machine(processes, threads, rounds)
    save_cluster(build_cluster(out, numbers, processes, f"{processes} processes of {threads} threads at once"), out)
    lines = [f"{name:30} {value:.4g}" for name, value in numbers.items()]
    return "\n".join([*lines, *describe_crowding(processes), f"written: {out}"])


def build_cluster(out: Path, found: Mapping[str, float], processes: int, at_once: str) -> Cluster:
    """Return the cluster file: measured numbers, and assumed values for all other numbers."""
    source = f"measured by gangline plan calibrate on {platform.node()}, {at_once}"
    numbers = {name: Quantity(value, why) for name, (value, why) in ASSUMED.items()}
    numbers |= {name: Quantity(value, source) for name, value in found.items()}
    for name in ("bandwidth", "latency"):  # one machine was measured, which has no links to other machines
        inside = numbers[f"link.node.{name}"].value
        numbers[f"link.cluster.{name}"] = Quantity(inside, "as inside the node: only one machine was measured")
    bandwidth = numbers["link.node.bandwidth"].value / 1e9
    topology = Topology(
        gpus_per_node=processes, node_bandwidth=bandwidth, rack_bandwidth=bandwidth, cluster_bandwidth=bandwidth
    )
    return Cluster(out.stem, f"{platform.machine()}, {at_once}", topology, numbers)


def count_threads(processes: int) -> int:
    """Return the number of threads per rank: OMP_NUM_THREADS, or else the number of cores over `processes`."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if setting.isdigit() and int(setting):
        return int(setting)
    return max(1, count_cores() // processes)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_crowding(processes: int) -> list[str]:
    """Return a line of text if there are more ranks than cores, else []: then rates are those of a share of a core."""
    if processes <= count_cores():
        return []
    return [
        f"{processes} processes share {count_cores()} cores: each rate is for a share of a core, not for a full core"
    ]


def _measure_machine(processes: int, threads: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        numbers_file, log = Path(place) / "found.json", Path(place) / "log"
        words = [sys.executable, "-m"]
        if processes > 1:
            words += ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
            words += [f"--nproc-per-node={processes}", "-m"]
        words += ["gangline_planner.calibrate.rank", str(numbers_file), str(threads), str(rounds)]
        of_a_job = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in of_a_job and not name.startswith(("TORCHELASTIC_", "PET_"))
        }
        environment["OMP_NUM_THREADS"] = str(threads)
        if run_ranks(words, environment, log) or not numbers_file.is_file():
            raise UserError(f"the measurement with {processes} processes failed.", *read_error(log))
        return {name: float(value) for name, value in json.loads(numbers_file.read_text(encoding="utf-8")).items()}


def run_ranks(words: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Run the ranks and return their exit code. Progress lines go to stderr, all other output to `log`."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with (
        log.open("w", encoding="utf-8") as log_file,
        subprocess.Popen(words, stdout=pipe, stderr=both, env=environment, text=True, errors="replace") as ranks,
    ):
        assert ranks.stdout is not None
        for line in ranks.stdout:
            if line.startswith(MARK):
                print(line, end="", file=sys.stderr, flush=True)
            else:
                log_file.write(line)
    return ranks.returncode


def read_error(log: Path) -> list[str]:
    """Return the first error that a rank printed, before the errors of torchrun; without an error, the last lines."""
    lines = [line.strip() for line in log.read_text(errors="replace", encoding="utf-8").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]:\s*)?[\w.]*(Error|Exception|Exit)\b", line)]
    return errors[:1] or lines[-3:] or ["The processes printed no error."]
