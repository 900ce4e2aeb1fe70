"""Rank functions for the tests of the launchers, and a small `train` that starts them.

python launched.py RUN_DIR WORLD TARGET [ARGS as JSON] [LocalLaunch as JSON]    as `launch=local` would
torchrun ... launched.py RUN_DIR agent TARGET [ARGS as JSON]                    as a rank of torchrun or Slurm
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path

from gangline.errors import UserError
from gangline.launch.errors import RestartWanted


def join():
    """Join the process group and return the rank and a function that adds a number over all ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def add(number: float) -> float:
        total = torch.tensor([float(number)])
        dist.all_reduce(total)
        return total.item()

    return dist.get_rank(), add


def write(run_dir: str, name: str, **content) -> None:
    """Write a JSON file of this rank under a temporary name, and rename it when it is complete."""
    final = Path(run_dir, f"{name}-{os.environ['RANK']}.json")
    final.with_suffix(".part").write_text(json.dumps({"pid": os.getpid(), **content}))
    final.with_suffix(".part").rename(final)


def reduce(run_dir: str) -> int:
    import torch

    rank, add = join()
    print(f"here is rank {rank}", flush=True)
    told = "OMP_NUM_THREADS" in os.environ
    write(run_dir, "reduce", sum=add(rank + 1), threads=None if told else torch.get_num_threads())
    return 0


def loaded(run_dir: str, module: str) -> int:
    write(run_dir, "loaded", found=module in sys.modules)
    return 0


def fail(run_dir: str, culprit: int, how: str) -> int:
    """Run two collectives, then end rank `culprit` as `how` says; the other ranks fail in the third collective."""
    rank, add = join()
    add(1), add(1)
    if rank == culprit:
        end(how)
    add(1)
    return 0


def leave_behind(run_dir: str) -> int:
    """Raise an exception on rank 1 while rank 0 sleeps outside of collectives."""
    rank, add = join()
    add(1)
    if rank == 1:
        end("raise")
    time.sleep(300)
    return 0


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("the answer is not 42")
    if how == "user":
        raise UserError("the corpus is empty.", "data.path=... names files to read")
    if how == "exit":
        sys.exit(7)
    print("about to go", flush=True)
    os.kill(os.getpid(), signal.Signals[how])


def truncate_mapped(run_dir: str, path: str, shorter: bool) -> int:
    """End by SIGBUS: read a mapped file beyond its truncated end, or send SIGBUS to this process if not `shorter`."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        if shorter:
            os.truncate(path, 10)
            print(mapped[-1])
    os.kill(os.getpid(), signal.SIGBUS)
    return 0


def refuse(run_dir: str) -> int:
    write(run_dir, f"started-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
    raise UserError("global batch 3 does not divide by 2.", "batch.global_size=4")


def ended(run_dir: str) -> int:
    print("a verdict stopped the run")
    return 3


def renew(run_dir: str) -> int:
    """Raise RestartWanted at each start, as a verdict that requests new workers does."""
    raise RestartWanted("bad-link at rank 0: 1 of 8 links")


def once(run_dir: str, culprit: int) -> int:
    """Kill rank `culprit` in the first start, and complete the collective in the second start."""
    rank, add = join()
    add(1)
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == culprit and restart == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    write(run_dir, "reduce", sum=add(rank + 1), restart=restart)
    return 0


def serverless(run_dir: str) -> int:
    """Kill the fork server of the running ranks."""
    rank, _ = join()
    write(run_dir, "started")
    if rank == 0:
        while len(list(Path(run_dir).glob("started-*.json"))) < 2:  # the other rank ends with the server
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
    return 0


def steps(run_dir: str, saving: float = 0.0) -> int:
    """Run a minimal training loop, in which a stop signal ends all ranks after the same step."""
    from gangline.launch.signals import stop_requested

    rank, add = join()
    step = 0
    while True:
        time.sleep(0.02)
        step += 1
        numbers = {None: 0, "SIGINT": 2, "SIGTERM": 15}
        if signum := int(add(numbers[stop_requested()] if rank == 0 else 0)):
            break
        write(run_dir, "step", step=step)
    write(run_dir, "heard", step=step)
    time.sleep(saving)
    write(run_dir, "saved", step=step, signal=signal.Signals(signum).name)
    return 128 + signum


def deaf(run_dir: str) -> int:
    """Keep the main thread in a system call that signals do not end, so that the rank reaches no step boundary."""
    import select

    write(run_dir, "step", step=1)
    read, _ = os.pipe()
    while True:
        select.select([read], [], [])


def note_grace(run_dir: str) -> None:
    """Record the timeout of each `PContext.close`, the seconds that ranks get to end, in the launcher's process."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def noted(context, death_sig=None, timeout=30):
        with Path(run_dir, "grace").open("a") as file:
            file.write(f"{timeout}\n")
        close(context, death_sig, timeout)

    PContext.close = noted


def tick(run_dir: str, name: str) -> None:
    """Write the process id to a file every 0.05 s, as a sidecar."""
    while True:
        Path(run_dir, name).write_text(str(os.getpid()))
        time.sleep(0.05)


def compose(run_dir: str):
    """Return the function that composes the run on rank 0 under torchrun and Slurm.

    run_dir: "fresh" leaves the choice of a directory to the run; "refused" raises an error.
    """

    def compose_and_write():
        from gangline.config.defaults import build_default_run
        from gangline.run.directory import RunDirectory

        if run_dir == "refused":
            raise UserError("curves=on is not available here.", "pip install gangline-curves")
        section = {"dir": None if run_dir == "fresh" else run_dir}
        return RunDirectory.create(build_default_run(run=section, parallel="ddp", track=[]))

    return compose_and_write


def task(directory: str, environ: dict[str, str], arguments: list[str]) -> None:
    """Run `main` as `srun` would start a task, with the output in a file."""
    os.chdir(directory)
    with Path(f"printed-{environ['SLURM_PROCID']}").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environ)
    sys.argv = ["launched.py", *arguments]
    sys.exit(main())


def main() -> int:
    run_dir, world, target, args, config = [*sys.argv[1:], *["[]", "{}"][len(sys.argv) - 4 :]]
    try:
        if world == "agent":
            from gangline_basics.launch.under_agent import run_under_agent

            run_under_agent(compose(run_dir), f"launched:{target}", tuple(json.loads(args)))
        from gangline_basics.launch import forkserver
        from gangline_basics.launch.config import LocalLaunch
        from gangline_basics.launch.local import start

        Path(run_dir, "train.json").write_text(json.dumps({"pid": os.getpid()}))
        forkserver.PRELOAD = forkserver.PRELOAD[:4]  # the ranks of these tests need only torch
        if target == "deaf":
            note_grace(run_dir)
        local = LocalLaunch(**json.loads(config))
        return start(run_dir, int(world), local, f"launched:{target}", tuple(json.loads(args)))
    except UserError as error:
        print(f"train: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
