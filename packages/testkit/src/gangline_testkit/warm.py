"""Warm starts of commands: forks of a server process that has torch (if installed) and Hydra loaded.

A warm start saves the imports, which take seconds of a core per process. The command has its own module, arguments,
environment, working directory and standard files. Differences from a cold start: the hash seed and everything else
that Python reads at its start come from the server, the fork server of its ranks is a fork of the command, and
`inspect.stack` has no source lines. Tests of the start itself use a cold start.
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
# Exceptions: variables that take effect in a fork, that every run sets, and that scikit-learn sets in the process of
# any test that imports it, even through another library.
FORKED = {"PYTHONPATH", "PYTHONSAFEPATH", "GOMP_SPINCOUNT", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
_PATH = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}  # before tests add entries
_server: WarmServer | None = None


class WarmServer:
    """Server process that forks commands. It ends with the process that created it.

    more: modules to load in addition to torch and Hydra, such as libraries of the tested part. The import of these
    modules must not start Python threads. environment: variables that these modules read on import.
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
            listener.listen(64)  # early requests wait until the server has loaded its modules
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
        """Return a command that runs `python -m MODULE` with this environment: as a fork or, if not possible, cold."""
        if self._fits(environment):
            return [sys.executable, "-I", "-S", str(CLIENT), self.address, module]
        return [sys.executable, "-m", module]

    def _fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether all variables that Python and its libraries read at their start equal those of the server."""
        names = {name for name in {*environment, *self.environment} if _READ_AT_START.fullmatch(name)} - FORKED
        return all(environment.get(name) == self.environment.get(name) for name in names)

    def list_processes(self) -> list[int]:
        """Return the ids of the processes that the server forked, and of all their descendants."""
        pids = [self._process.pid]
        for pid in pids:  # the list grows during the loop
            pids += find_children(pid)
        return pids[1:]

    def close(self) -> None:
        """Stop the server, and wait for its end."""
        os.close(self._alive)
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def make_command(module: str, environment: Mapping[str, str]) -> list[str]:
    """Return `WarmServer.make_command` of the server of this process."""
    return get_server().make_command(module, environment)


def get_server() -> WarmServer:
    """Return the warm server of this process, which starts on first use."""
    global _server
    if _server is None:
        _server = WarmServer()
        atexit.register(_server.close)
    return _server
