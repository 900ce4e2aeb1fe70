"""Commands that start warm: forked from a process that has torch (if it is installed) and Hydra loaded.

A test that runs `train` then waits for what it does and not for its imports, which take seconds of a core in each of
its processes. The command runs with its own module, words, variables, directory and files. Differences: the hash
seed, and what Python reads at its start, are the server's; the server of its ranks is forked from it; and
`inspect.stack` has no lines of source. A test of the start itself starts cold.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from gangline_testkit.processes import find_children

CLIENT = Path(__file__).with_name("warm_client.py")
_READ_AT_START = re.compile(r"(PYTHON|OMP_|GOMP_|MKL_|KMP_|LD_|MALLOC_|TORCH_LOGS|LANG|LC_).*")
# Exceptions: variables that a fork can still follow, that every run sets for itself, and that scikit-learn sets for the
# whole process of a test that imports it, even by way of another library.
FORKED = {"PYTHONPATH", "PYTHONSAFEPATH", "GOMP_SPINCOUNT", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
_PATH = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}  # before a test added to it
_server: WarmServer | None = None


class WarmServer:
    """Process that commands are forked from; it ends with the process that created it.

    more: modules to load in addition to torch and Hydra, such as libraries that the part under test imports while it
    runs. They must start no Python thread. environment: variables that these modules read when they are loaded.
    """

    def __init__(self, more: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        self.directory = tempfile.mkdtemp(prefix="gangline-warm-")
        self.address = f"{self.directory}/socket"
        variables = {**os.environ, **(environment or {})}
        base_variables = {name: value for name, value in variables.items() if name not in FORKED}
        self.environment = {**base_variables, **_PATH, "OMP_NUM_THREADS": "1"}
        waits, self._alive = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)  # early requests wait until all is loaded
            files = (listener.fileno(), waits)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gangline_testkit.warm_server", *map(str, files), *more],
                pass_fds=files,
                env=self.environment,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        os.close(waits)

    def make_command(self, module: str, environment: Mapping[str, str]) -> list[str]:
        """Return the command that stands for `python -m MODULE` with these variables; that itself if no fork can."""
        if self._fits(environment):
            return [sys.executable, "-I", "-S", str(CLIENT), self.address, module]
        return [sys.executable, "-m", module]

    def _fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether Python and its libraries would have read equal variables at their start."""
        names = {name for name in {*environment, *self.environment} if _READ_AT_START.fullmatch(name)} - FORKED
        return all(environment.get(name) == self.environment.get(name) for name in names)

    def list_processes(self) -> list[int]:
        """Return the ids of the processes that were forked from the server, and of all their descendants."""
        pids = [self._process.pid]
        for pid in pids:  # it grows
            pids += find_children(pid)
        return pids[1:]

    def close(self) -> None:
        """End the server, and wait for it."""
        os.close(self._alive)
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def make_command(module: str, environment: Mapping[str, str]) -> list[str]:
    """Return the result of `WarmServer.make_command` of this process's server."""
    return get_server().make_command(module, environment)


def get_server() -> WarmServer:
    """Return the server of this process, which is started on first use."""
    global _server
    if _server is None:
        _server = WarmServer()
        atexit.register(_server.close)
    return _server
