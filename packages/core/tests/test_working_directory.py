"""Third-party files in the working directory of `train`, such as an unpacked archive: their code is never run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gangline.config.answers import Sidecar
from gangline.run import provenance
from gangline_basics.launch import sidecars

WARM = """
import multiprocessing
from gangline_basics.launch import forkserver

if __name__ == "__main__":
    forkserver.PRELOAD = ("gangline_basics.launch.server", "json")
    forkserver.warm()
    child = multiprocessing.get_context("forkserver").Process(target=print, args=("forked",))
    child.start()
    child.join()
    assert child.exitcode == 0
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Fill the working directory with modules that shadow imported ones and write a file when they are imported."""
    for name in ("socket", "signal", "pluggy", "threading", "json"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'IMPORTED')!r}, 'a').write({name!r})\nraise SystemExit\n"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fork_server_imports_no_module_of_working_directory(planted):
    (planted / "bin").mkdir()
    (planted / "bin" / "train").write_text(WARM)  # like the installed command, whose folder Python adds to the path
    done = subprocess.run([sys.executable, "bin/train"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (planted / "IMPORTED").exists()


def test_sidecar_imports_no_module_of_working_directory(planted):
    (planted / "logs").mkdir()
    started = sidecars.start(
        [Sidecar(name="one", target="gangline.run.ending:read_ending", args=())], planted, os.getpid()
    )
    assert started[0].process.wait() == 0
    assert not (planted / "IMPORTED").exists()


def test_commands_of_git_configuration_are_not_run(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "code").write_text("x\n")
    (tmp_path / ".gitattributes").write_text("* filter=planted\n")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "one")
    for name in ("core.fsmonitor", "filter.planted.clean", "filter.planted.process"):
        git("config", name, f"touch '{tmp_path}/RAN'; cat")
    os.utime(tmp_path / "code", (1, 1))  # a new time makes git read the file
    assert provenance.read_git(tmp_path)["dirty"] is False
    (tmp_path / "code").write_text("y\n")
    assert provenance.read_git(tmp_path)["dirty"] is True
    assert not (tmp_path / "RAN").exists()
