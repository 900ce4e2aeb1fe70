"""Measure the time from Enter to the first step of `train`, compared with `import torch` and with torchrun.

    python benchmarks/startup.py [--rounds 5] [--world 1 2 8]

torchrun starts a bare PyTorch loop. Every round runs each way once, so that load on the machine affects all ways
equally; numbers are medians over the rounds. Both train the same model on the same global batch, on the CPU. Goals:
with one process at most the time of `import torch, torch._dynamo` plus 2 s; with 8 at most 0.3 x torchrun.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
IMPORTS = {"import torch": "import torch", "import torch, torch._dynamo": "import torch, torch._dynamo"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)  # run as a rank of torchrun
    options = parser.parse_args()
    if options.bare:
        bare(options.bare)
        return
    names = [*IMPORTS, *(f"{kind}, {world}" for world in options.world for kind in ("train", "torchrun"))]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for code in IMPORTS.values():  # fill the page cache
        time_import(code)
    for _ in range(options.rounds):
        for name in names:
            took = time_import(IMPORTS[name]) if name in IMPORTS else time_start(*name.split(", "))
            seconds[name].append(took)
    for name in names:
        print(f"{name:<28}", *(f"{took:7.2f}" for took in seconds[name]))
    print("\nmedians")
    show({name: statistics.median(found) for name, found in seconds.items()}, options.world)


def time_import(code: str) -> float:
    began = time.time()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.time() - began


def time_start(kind: str, world: str) -> float:
    """Return the seconds until the first step has written a file."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run", "metrics.jsonl")
        if kind == "train":
            layout = ["parallel=single"] if world == "1" else ["parallel=ddp", f"launch.processes={world}"]
            settings = ["run.device=cpu", "run.steps=1", "run.sample=0", "validate.every=null", "checkpoint=off"]
            command = ["gangline.cli.train", f"run.dir={metrics.parent}", *settings, *layout]
        else:
            command = ["torch.distributed.run", "--nproc-per-node", world, __file__, "--bare", str(metrics)]
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        began = time.time()
        done = subprocess.run([sys.executable, "-m", *command], env=environ, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return metrics.stat().st_mtime - began


def bare(metrics: Path) -> None:
    """Run one step of the same run in the bare loop; rank 0 then writes a file."""
    import torch
    from bare_loop import BareLoop

    from gangline.config.defaults import build_default_run
    from gangline.plugin.registry import build

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    run = build_default_run()
    run.batch.global_size //= world  # each rank's share
    BareLoop(run, build(run.data, run, "train"), build(run.schedule, run)).train(1)
    if rank == 0:
        metrics.parent.mkdir()
        metrics.write_text("done")


def show(medians: dict[str, float], worlds: list[int]) -> None:
    loaded = medians["import torch, torch._dynamo"]
    for name in IMPORTS:
        print(f"{name:<28} {medians[name]:6.2f} s")
    print(f"\n{'processes':>9}  {'train':>8}  {'torchrun':>8}  {'ratio':>6}  {'train - imports':>15}")
    for world in worlds:
        ours, theirs = medians[f"train, {world}"], medians[f"torchrun, {world}"]
        print(f"{world:>9}  {ours:6.2f} s  {theirs:6.2f} s  {ours / theirs:6.2f}  {ours - loaded:13.2f} s")


if __name__ == "__main__":
    main()
