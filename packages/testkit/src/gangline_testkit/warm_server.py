"""Server of `warm`: a process with torch and Hydra loaded, whose forks run `python -m MODULE ...`.

The server only imports modules. It runs no torch operation and no thread, so that its forks behave like new processes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from multiprocessing import forkserver as _forkserver, resource_tracker, util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from gangline.errors import UserError
from gangline.plugin.hooks import ENTRY_POINTS
from gangline_basics.launch import forkserver
from gangline_testkit.warm_client import NUMBER

SIGNALS_OF_THE_SERVER = "gangline_basics.launch.server"
LOADED = (
    *(name for name in forkserver.PRELOAD if name != SIGNALS_OF_THE_SERVER),  # only for the fork server of the ranks
    "gangline.api",
    "gangline.plugin.builtin",
    "gangline.cli",
    "gangline.config.check",
    "gangline.config.compose",
    "gangline.config.resume",
    "gangline_basics.launch.elastic",
    "gangline.launch.requeue",
    "gangline_basics.launch.sidecars",
    "hydra",
    "yaml",
)
# Modules that plot the loss figure at the end of a run; an optional dependency.
DRAWING = ("matplotlib.figure", "matplotlib.backends.backend_svg")
# Groups whose parts every rank builds. Other parts are not preloaded, because importing them may start threads.
BUILT = ("model", "parallel", "optimizer", "checkpoint")
RANK = (  # modules that each rank imports when it builds the model
    "gangline_basics.model.block",
    "gangline_basics.model.attention",
    "gangline_basics.model.feed_forward",
    "gangline_basics.model.head",
    "gangline_basics.model.norm",
    "gangline_basics.model.last_value_cache",
    "numpy.random",
    "torch.utils._device",
)
MANY = 4096  # greater than every open file descriptor
CLIENT = str(Path(__file__).with_name("warm_client.py"))
# Modules that import torch. If a forked command starts `python -m MODULE`, this server forks that process too.
STARTED = ("gangline.cli.train", "gangline_basics.launch.node")


def main() -> None:
    """Serve requests on the socket of the first argument, until the pipe of the second argument has no writer.

    Both arguments are file descriptors. Further arguments are modules to load in addition to `LOADED`.
    """
    forkserver.set_environment()
    _load(sys.argv[3:])
    _compose()
    inspect.stack = _stack
    gc.collect()
    gc.freeze()  # so that garbage collection in a fork does not copy memory pages
    listener, alive = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    address = listener.getsockname()
    request = _serve(listener, alive)
    if request is not None:
        _become(request, address)
        _end(_run_module(request["module"]))


def _load(more: Sequence[str]) -> None:
    """Import the modules of commands and `more`. Without torch, skips modules that need torch."""
    for name in (*LOADED, *more):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            if find_spec("torch") is not None:
                raise
    with contextlib.suppress(ImportError):
        for name in DRAWING:
            importlib.import_module(name)
    # preload plugin modules, because each command discovers the plugins
    for plugin in entry_points(group=ENTRY_POINTS):
        with contextlib.suppress(Exception):
            importlib.import_module(plugin.module)
    for name in (*_list_builds(), *RANK):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _list_builds() -> list[str]:
    """Return the modules with the build functions of all installed parts of the groups `BUILT`."""
    from gangline.plugin.registry import installed

    offers = [offer for group in BUILT for offer in installed().get_offers(group).values()]
    installed.cache_clear()
    return sorted({offer.part.build.partition(":")[0] for offer in offers})


def _compose() -> None:
    """Compose a run once to fill the caches of Hydra's parser for all forks, then clear gangline's plugin cache."""
    from gangline.config.compose import compose_one
    from gangline.plugin.registry import installed

    with contextlib.suppress(UserError):
        compose_one(["recipe=tiny"])
    installed.cache_clear()


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    """Return `inspect.stack()` without source lines.

    `inspect.stack` searches thousands of loaded modules for the source lines of each frame. Torch's rendezvous and
    Hydra call it twenty times at the start of a run, more than half of the CPU time of a small run.
    """
    frame, frames = inspect.currentframe(), []
    while frame is not None and (frame := frame.f_back) is not None:
        code = frame.f_code
        frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
    return frames


def _run_module(module: str) -> int:
    """Run a module as `python -m MODULE` does, and return its exit code, or minus the signal number."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Exit as Python does, but without module teardown, which with torch takes more than a second of a core."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _serve(listener: socket.socket, alive: int) -> dict[str, Any] | None:
    """Fork a process per request, and send its id and exit code to the client. Returns the request in the fork."""
    child_pipe, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    while True:
        waiting: list[Any] = [listener, alive, child_pipe, *running.values()]
        ready, _, _ = select.select(waiting, [], [])
        if alive in ready:
            return None
        if child_pipe in ready:
            os.read(child_pipe, 4096)
            _tell_ends(running)
        for pid, asker in running.items():
            if asker in ready:  # the client was killed, which closed the socket: kill its process
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # so that the process is dead before the next request
        if listener in ready:
            asker, _ = listener.accept()
            request, files = _receive(asker)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number, file in enumerate(files):
                    os.dup2(file, number)
                os.closerange(3, MANY)
                for one in (asker, listener, *running.values()):
                    one.detach()
                return request
            for file in files:
                os.close(file)
            asker.sendall(NUMBER.pack(pid))
            running[pid] = asker


def _tell_ends(running: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with running.pop(pid) as asker, contextlib.suppress(OSError):
                asker.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _receive(asker: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return (request, file descriptors for standard input, output and error)."""
    first, files, _, _ = socket.recv_fds(asker, NUMBER.size, 3)
    (length,) = NUMBER.unpack(first)
    content = b""
    while len(content) < length:
        content += asker.recv(length - len(content))
    return json.loads(content), files


def _become(request: dict[str, Any], address: str) -> None:
    """Set up this fork as the requested process: signals, session, directory, environment, path, arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(request["cwd"])
    before = _list_entries(os.environ)
    os.environ.clear()
    os.environ.update(request["environment"])
    own_entries = [entry for entry in sys.path[1:] if entry not in before]
    here = [] if os.environ.pop("PYTHONSAFEPATH", "") else [request["cwd"]]
    sys.path[:] = [*here, *_list_entries(os.environ), *own_entries]
    importlib.invalidate_caches()
    _forget([entry for entry in sys.path if entry not in (*own_entries, *before)])
    if any(Path(entry, "sitecustomize.py").exists() for entry in _list_entries(os.environ)):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    sys.argv = [request["module"], *request["words"]]
    util.spawnv_passfds = _fork_the_first_server(util.spawnv_passfds)
    setattr(subprocess, "Popen", _make_popen(address))  # noqa: B010


def _forget(entries: Sequence[str]) -> None:
    """Remove loaded modules of packages that exist in `entries`, so that this process imports its own versions."""
    for name in {name.partition(".")[0] for name in sys.modules} - {"__main__"}:
        spec = PathFinder.find_spec(name, entries)
        if spec is not None and spec.loader is not None:  # a plain directory does not hide a package
            for module in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
                del sys.modules[module]


def _make_popen(address: str) -> type[subprocess.Popen[Any]]:
    """Return a Popen for which the server forks processes of `STARTED` that inherit this environment."""

    class Popen(subprocess.Popen[Any]):
        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            words = [word for word in args if word != "-P"]
            if words[:2] == [sys.executable, "-m"] and words[2] in STARTED and options.get("env") is None:
                if len(words) < len(args):
                    options["env"] = {**os.environ, "PYTHONSAFEPATH": "1"}
                args = [sys.executable, "-I", "-S", CLIENT, address, *words[2:]]
            super().__init__(args, *more, **options)

    return Popen


def _list_entries(environment: Any) -> list[str]:
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _fork_the_first_server(spawn: Any) -> Any:
    """Return a replacement of `spawnv_passfds` that forks this process for the first fork server of the ranks.

    Later fork servers start cold, because by then this process has threads and has used torch.
    """
    prefixes = ["from multiprocessing.forkserver import main"]

    def start(path: str, arguments: list[Any], files: list[int]) -> int:
        if not prefixes or not str(arguments[-1]).startswith(prefixes[0]):
            return int(spawn(path, arguments, files))
        prefixes.clear()
        pid = os.fork()
        if pid == 0:
            try:
                _be_the_server(arguments[-1], files)
            finally:
                os._exit(0)
        return pid

    return start


def _be_the_server(code: str, files: list[int]) -> None:
    """Run code as `python -c CODE` does in a new fork, with only these file descriptors open."""
    _leave_no_file_of_the_parent(files)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    server: Any = _forkserver._forkserver  # the state of the parent, which holds the lock
    server._lock = threading.Lock()
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    sys.modules["__main__"] = ModuleType("__main__")
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    logging.root.handlers = []
    with contextlib.suppress(SystemExit):
        exec(code, {})


def _leave_no_file_of_the_parent(files: list[int]) -> None:
    """Replace every open file descriptor, except 0 to 2 and `files`, by the null device.

    Closed descriptors would be reused, for example for the pipe of a rank. An inherited object that has the old number,
    such as a logging handler, would then write into the pipe or close it.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != null and number not in files:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is already closed
                os.fstat(number)
                os.dup2(null, number)
    os.close(null)


if __name__ == "__main__":
    main()
