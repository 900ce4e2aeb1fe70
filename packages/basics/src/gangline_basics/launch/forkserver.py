"""Fork server: a process with torch loaded, from which ranks are forked in milliseconds. Torch-free.

The server only imports modules: it runs no torch operation (a fork after an OpenMP region hangs in the child) and
touches no GPU (CUDA cannot be used after a fork).
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker, util
from typing import TYPE_CHECKING, Any

from gangline.config.sections import Recompute
from gangline.errors import UserError
from gangline.launch.base import Preparation
from gangline_basics.launch import semaphores

if TYPE_CHECKING:
    from gangline.config.schema import Run

# Modules that every rank needs, or may need while its run is not yet known. The server silently skips a module that
# cannot be imported, so a test imports each module.
PRELOAD = (
    "gangline_basics.launch.server",  # first, because it installs the signal handlers of the server
    "torch",
    "torch.distributed",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.utils.checkpoint",
    "torch.distributed.checkpoint",
    "torch.optim",
    "gangline_basics.launch.worker",
    "gangline.train.rank",
    "gangline_basics.launch.ready",
)

# Modules of PRELOAD that a known run needs only for some parts; `list_modules` then adds them.
OF_SOME_PARTS = ("torch.distributed.checkpoint", "gangline_basics.launch.ready")

_ENDS_SECONDS = 5.0  # maximum wait in seconds for the exit of a server after its connections have closed

# Error numbers of an unusable TMPDIR. None: Python raises an OSError without a number if the path is too long.
_OF_THE_SOCKET = (None, errno.ENAMETOOLONG, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT)

_loading: set[str] = set()  # modules that the running server loads
_adopted = 0  # process id of a server that another process started


def warm(more: Iterable[str] = (), run: Run | None = None) -> None:
    """Start the server in the background, unless a running server also loads `more`; return at once.

    Call this before anything slow, and again with the modules that the run needs. The ranks get the environment of the
    server's start, without later changes. If an adopted server lacks modules, each rank imports them.
    run: the only run whose ranks will be forked, so that only the modules of its parts are loaded.
    Raises UserError if the server cannot start: no socket in TMPDIR, no semaphore in /dev/shm.
    """
    if _adopted:
        return
    setattr(util, "_args_from_interpreter_flags", _list_flags)  # noqa: B010
    start_tracker()
    every = PRELOAD if run is None else tuple(name for name in PRELOAD if name not in OF_SOME_PARTS)
    modules = {*every, *more, *(list_modules(run) if run is not None else ())}
    if not modules <= _loading:
        if _loading:
            drop()
        set_environment()
        semaphores.name_semaphores()
        _loading.update(modules)
        multiprocessing.set_forkserver_preload([*every, *sorted(_loading - set(every))])
    try:
        forkserver.ensure_running()
    except OSError as error:
        if error.errno not in _OF_THE_SOCKET:
            raise
        raise UserError(
            f"a socket cannot be created in {tempfile.gettempdir()}: {error.strerror or error}.",
            "The fork server of the ranks needs a socket in TMPDIR, with a path of at most 107 characters.",
            "TMPDIR=/tmp train ...",
        ) from error


def start_tracker() -> None:
    """Start Python's resource tracker with SIGHUP blocked.

    The tracker ignores Ctrl-C and SIGTERM, but the SIGHUP of a closed terminal would end it, and lose its list of
    semaphores.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _list_flags() -> list[str]:
    """Return the flags with which multiprocessing starts Python: the flags of this process, and -P.

    Without -P a socket.py in the working directory would be imported by the server and by the resource tracker.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [*(flag for flag in flags if flag != "-P"), "-P"]


def find_loaded() -> set[str]:
    """Return the modules that the running server loads or has loaded."""
    return set(_loading)


def adopt(loaded: set[str]) -> None:
    """Fork ranks from the server that forked this process, which has loaded the modules `loaded`.

    Otherwise multiprocessing would start another server here.
    """
    global _adopted
    _adopted = os.getppid()
    _loading.update(loaded)
    server: Any = forkserver._forkserver
    server.ensure_running = lambda: None


def find_needed(run: Run) -> set[str]:
    """Return the modules, in addition to PRELOAD, that every rank of a run would otherwise import by itself.

    torch._dynamo takes more than half of the loading time, and torch imports it on the first use of compile or of
    torch.utils.checkpoint.
    """
    modules = list_preloads(run) - find_usual()
    if run.job.compile or run.job.recompute is not Recompute.none:
        modules.add("torch._dynamo")
    return modules


def list_preloads(run: Run) -> set[str]:
    """Return the modules that the parts of a run need in every rank."""
    return {name for _, config in run.iterate_parts() for name in config.preload(run)}


def find_usual() -> set[str]:
    """Return the modules that the default parts need, which are loaded before a run is known."""
    from gangline.config.defaults import build_default_run

    return list_preloads(build_default_run())


def find_default_suppliers() -> set[str]:
    """Return the distributions that supply the installed default parts."""
    from gangline.config.defaults import get_default_choices
    from gangline.plugin.registry import installed

    choices = get_default_choices().items()
    pairs = [(group, name) for group, choice in choices for name in ([choice] if isinstance(choice, str) else choice)]
    offers = [installed().get_offers(group).get(name) for group, name in pairs]
    return {offer.distribution for offer in offers if offer is not None}


def list_modules(run: Run) -> set[str]:
    """Return the modules of `find_needed`, and the modules of all parts of the run from the default distributions."""
    from gangline.plugin.registry import installed

    usual, offers = find_default_suppliers(), [installed().find_part(config) for _, config in run.iterate_parts()]
    return {
        *find_needed(run),
        *list_preloads(run),
        *(offer.part.build.partition(":")[0] for offer in offers if offer.distribution in usual),
    }


def set_environment() -> None:
    """Set the variables that torch must find when it is first imported, unless the user has set them."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # counting GPUs must not open one before a fork
    # A waiting OpenMP thread spins, and so blocks a core that other threads may need. On two busy cores, two threads
    # take ten times as long. 1000 spins is libgomp's own setting if there are more threads than cores.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def read_exit() -> int:
    """Return the exit code of a server that does not answer: -n after signal n; 0 if the server is alive.

    On a busy machine the server's connections close some time before the system reports its exit, so this function
    waits. The exit code of an adopted server is unknown; SIGKILL is assumed, the signal of the out-of-memory killer.
    """
    end = time.monotonic() + _ENDS_SECONDS
    while not (code := _poll_exit()) and time.monotonic() < end:
        time.sleep(0.01)
    return code


def _poll_exit() -> int:
    """Return the exit code of the server, or 0 while it is alive or if no server was started."""
    if _adopted:
        return 0 if os.getppid() == _adopted else -signal.SIGKILL
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is None:
        return 0
    try:
        siginfo = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 1
    if siginfo is None:
        return 0
    return siginfo.si_status if siginfo.si_code == os.CLD_EXITED else -siginfo.si_status


def drop() -> None:
    """Kill the server at once. A server without ranks would keep the terminal busy until torch is loaded."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
    _loading.clear()


class ForkServer(Preparation):
    """Fork server that `train` starts while the run is composed."""

    def start(self) -> None:
        warm()

    def stop(self) -> None:
        drop()
