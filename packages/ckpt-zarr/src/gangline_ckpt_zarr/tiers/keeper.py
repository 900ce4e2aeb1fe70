"""Keeper: the process on each node that keeps the memory tier while workers and agents restart. Torch-free.

A keeper serves its node's files to other nodes and stores copies of their files. If the node's agent was killed, the
keeper waits for the keeper of the next agent, which takes the directory over. No keeper deletes a directory that
another keeper has taken over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from gangline import UserError
from gangline.launch.guard import read_birth, read_namespace
from gangline.launch.network import name_of_this_node
from gangline.run.ending import read_ending
from gangline.storage.files import lock_folder
from gangline_ckpt_zarr.tiers.peers import FOLDER, Address, announce, identify_machine, withdraw
from gangline_ckpt_zarr.tiers.places import TROUBLE, locate_node, locate_run, locate_user, make
from gangline_ckpt_zarr.tiers.server import Server

OWNER = ".keeper"  # file in the tier's directory with the owner: "NAMESPACE-PID-START-TOKEN" of the keeper's process
RUN = ".run"  # file in the tier's directory with the path of the run directory
ABANDONED_SECONDS = 12 * 3600.0  # seconds after the last save until a keeper removes the directory of a dead keeper
LAST_WORDS = 5.0  # maximum seconds from a kill of the launcher to the end of its ranks; below the sidecar's `outlives`
LOOK_SECONDS = 0.2


def keep(run_dir: str, waits: float = 0.0, shares: bool = True) -> None:
    """Run the keeper. The directory exists until the job ends, and up to `waits` s longer if the launcher was killed.

    shares: whether the launcher may start ranks of the run on other machines.
    """
    place, launcher = locate_node(run_dir), os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # also in the server's threads
    owner = f"{read_namespace()}-{os.getpid()}-{read_birth(os.getpid())}-{secrets.token_hex(8)}"
    sweep(run_dir)
    with _lock(place):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        (place / TROUBLE).unlink(missing_ok=True)
        (place / RUN).write_text(os.path.realpath(run_dir))
        (place / OWNER).write_text(owner)
    server = Server(place, choose_host(shares))
    address = Address(name_of_this_node(), identify_machine(), server.port, server.token)
    try:
        announce(run_dir, address)
    except (OSError, UserError) as error:  # this node's own ranks still find the memory tier
        (place / TROUBLE).write_text(_explain_not_announced(Path(run_dir, FOLDER), error))
    signal.sigwait({signal.SIGTERM})
    killed = os.getppid() != launcher
    if killed and waits:
        _wait(place, owner, run_dir, waits)
    withdraw(run_dir, address)
    _remove(place, owner)
    if killed and not waits:  # ranks that are ending may still create files in a save
        end = time.monotonic() + LAST_WORDS
        while time.monotonic() < end:
            time.sleep(0.1)
            _remove(place, owner)


def sweep(run_dir: str | Path, seconds: float = ABANDONED_SECONDS) -> list[Path]:
    """Remove the memory tiers of this user's other runs that were killed; return the removed directories.

    The next start of a killed run would resume from its memory tier, so `seconds` must have passed since its last save.
    A directory whose keeper ran in another process id namespace is not removed.
    """
    removed = []
    for place in find_abandoned(run_dir):
        with contextlib.suppress(OSError):
            if time.time() - place.stat().st_mtime > seconds:
                _remove(place, _read_owner(place))
                removed.append(place)
    if removed:
        print(f"removed the memory tiers of killed runs: {', '.join(map(str, removed))}", flush=True)
    return removed


def find_abandoned(run_dir: str | Path | None) -> list[Path]:
    """Return the memory-tier directories on this machine of this user's other runs whose keeper was killed."""
    own = None if run_dir is None else locate_run(run_dir)
    return [
        place
        for place in sorted(locate_user().glob("*/*/"))
        if place.parent != own and (owner := _read_owner(place)) and _is_dead(owner)
    ]


def run_of(place: Path) -> str:
    """Return the run directory to which a memory-tier directory belongs; "" if it is not recorded."""
    return _read(place / RUN)


def _is_dead(owner: str) -> bool:
    """Return whether the keeper of a directory has ended; False if it ran in another process id namespace."""
    if not owner:
        return True
    among, *process = owner.split("-")[:3]
    return among == str(read_namespace()) and len(process) == 2 and str(read_birth(int(process[0]))) != process[1]


def choose_host(shares: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address that a keeper binds to: loopback if all ranks are on this machine, else "" (all interfaces).

    Under torchrun and Slurm the environment of the ranks decides; with a gangline launcher, `shares` decides.
    """
    here = not shares and environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE")
    return "127.0.0.1" if here else ""


def _explain_not_announced(folder: Path, error: OSError | UserError) -> str:
    """Return the run's message about a keeper that could not publish its address (`MemoryTier.read_trouble`)."""
    path = Path(getattr(error, "filename", None) or folder)
    why = getattr(error, "strerror", None) or str(error)
    with contextlib.suppress(OSError):
        if isinstance(error, PermissionError):
            why += f"; owned by user {path.stat().st_uid}, this process runs as user {os.getuid()}"
    return (
        f"other nodes cannot use the memory tier of this node, because its address could not be published: {path}: "
        f"{why}. The run continues, and restarted ranks of this node find its memory tier. If the node is lost, so is "
        f"its memory tier. To publish the address, restart the run after the owner has run:  rm -r {folder}"
    )


def _wait(place: Path, mine: str, run_dir: str, seconds: float) -> None:
    """Wait until a successor has taken over, the job is over, SIGTERM arrives, or `seconds` have passed."""
    before, end = read_ending(run_dir), time.monotonic() + seconds
    while time.monotonic() < end and _read_owner(place) == mine:
        ending = read_ending(run_dir)
        if ending is not None and ending != before and not ending.requeue:
            return
        if signal.sigtimedwait({signal.SIGTERM}, LOOK_SECONDS) is not None:
            return


def _remove(place: Path, mine: str) -> None:
    """Remove a directory that this keeper owns, or that has no owner because a running save has recreated it."""
    trash = place.with_name(f"{place.name}-{mine}")
    with _lock(place):
        if _read_owner(place) not in (mine, ""):
            return
        with contextlib.suppress(OSError):
            place.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.parent.rmdir()


def _read_owner(place: Path) -> str:
    return _read(place / OWNER)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _lock(place: Path) -> contextlib.AbstractContextManager[None]:
    """Lock this user's directory, so that one keeper at a time takes over or removes a directory in it."""
    make()
    return lock_folder(place.parent.parent)
