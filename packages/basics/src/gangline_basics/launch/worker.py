"""Main function of each rank, for every launcher: set up the process, run the work, report the end."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from gangline.errors import UserError
from gangline.launch import guard, signals
from gangline.launch.errors import is_lost_peer
from gangline.plugin.registry import load
from gangline.pulse import memory, write as pulse
from gangline.run.ending import EXIT_FAILURE, EXIT_REQUEUE, read_ending
from gangline.run.generation import Fenced, read_generation
from gangline_basics.launch import failures
from gangline_basics.launch.failures import RankFailure
from gangline_basics.launch.rank_log import divert

WORK = "gangline.train.rank:train_rank"
SPARE = "GANGLINE_SPARE"  # environment variable that is set only for spare ranks
SPARE_SECONDS = 0.5  # interval in seconds between a spare rank's checks of the job


def main(run_dir: str, target: str = WORK, args: tuple[Any, ...] = (), agent: int | None = None) -> int:
    """Run `target(run_dir, *args)` as this rank, and return the exit code of the process.

    agent: process id of the local launcher, if it monitors this rank; None: torchrun or Slurm monitors the rank.
    Exceptions are not raised: they are written to the rank's log, and the start's first failure also to its own file.
    """
    guard.die_with(os.getppid())  # the parent is the fork server, torchrun or a Slurm step
    if agent is not None:
        guard.die_with(agent)
    signals.install(by_agent=agent is not None)
    rank = int(os.environ.get("RANK", "0"))
    logs = Path(run_dir, "logs")
    logs.mkdir(exist_ok=True)
    log = divert(logs, rank)
    attempt = read_generation()
    if agent is None:  # with gangline's launcher, the launcher checks this
        before = failures.find_first(logs, attempt - 1)
        final = before is not None and not before.is_transient and before.exit_code != EXIT_REQUEUE
        if before is not None and final:  # a restart cannot fix a user error or reverse a verdict
            failures.claim(logs, attempt, before)
            return before.exit_code
    if SPARE in os.environ:
        return _wait(run_dir, attempt)
    set_threads()
    show_outside(run_dir, rank, agent or os.getppid(), log)
    try:
        code = load(target)(run_dir, *args) or 0
    except KeyboardInterrupt:
        return 130
    except Fenced as fenced:
        print(fenced, flush=True)
        return EXIT_FAILURE
    except BaseException as error:
        return _record_failure(error, rank, logs, attempt, log)
    if code:
        failures.claim(logs, attempt, RankFailure(rank, "ended", code))
    return code


def enter(run_dir: str, target: str, args: tuple[Any, ...], agent: int) -> int:
    """Run `main` for the elastic agent. A finished rank returns, as the agent expects; a failed rank exits at once."""
    code = main(run_dir, target, args, agent)
    return code if code == 0 else leave(code)


def leave(code: int) -> NoReturn:
    """Exit without tearing down the interpreter, like a rank that the fork server forked.

    Threads of live communicators sometimes abort the process during teardown, which would make a finished run fail. A
    failed rank does not wait for threads.
    """
    if code == 0:
        threading._shutdown()  # type: ignore[attr-defined]  # ends idle executors, and waits for all other threads
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk
            stream.flush()
    os._exit(code)


def _wait(run_dir: str, mine: int) -> int:
    """Wait as a spare rank, which no layout can use, until the job is over or the agent stops it for another start."""
    print(f"rank {os.environ['RANK']}: no layout can use this rank, so it waits as a spare", flush=True)
    while True:
        ending = read_ending(run_dir)
        if ending is not None and ending.generation == mine:
            return ending.exit_code
        if signals.stop_requested() is not None:
            return EXIT_REQUEUE
        time.sleep(SPARE_SECONDS)


def show_outside(run_dir: str, rank: int, owner: int, log: TextIO) -> None:
    """Publish this rank's pulse, and write thread stacks to its log on the signal `signals.STACKS`, even when busy."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        memory.sweep()
    pulse.use(pulse.Pulse.open(run_dir, rank, int(os.environ.get("WORLD_SIZE", "1")), read_generation(), owner))
    if signals.STACKS is not None:
        faulthandler.register(signals.STACKS, log, all_threads=True)


def set_threads() -> None:
    """Share the cores among the ranks of this machine, unless OMP_NUM_THREADS is set.

    libgomp reads the environment when the fork server loads it, so setting the variable here would have no effect.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _record_failure(error: BaseException, rank: int, logs: Path, attempt: int, log: TextIO) -> int:
    failure = RankFailure.of(rank, error)
    with suppress(OSError):  # a full disk
        log.write(failure.trace or f"{error}\n")
    if not isinstance(error, UserError) and is_lost_peer(error):
        time.sleep(failures.PEER_WAIT_SECONDS)
        return EXIT_FAILURE
    if failures.claim(logs, attempt, failure) and not failures.is_written(logs, attempt):
        print(f"train: {failure.what}", *failure.details, sep="\n  ", file=sys.stderr)
    return failure.exit_code
