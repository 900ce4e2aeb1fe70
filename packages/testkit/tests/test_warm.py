"""Warm start of commands: a fork of a process with torch behaves like a new Python process."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangline_testkit import warm, warm_server
from gangline_testkit.processes import wait_until_none_lives

SAYS = """
import json, os, sys
print(json.dumps({
    "words": sys.argv[1:], "name": __name__, "cwd": os.getcwd(), "seen": os.environ.get("SEEN"), "path": sys.path,
    "customized": getattr(sys, "customized", False), "torch": "torch" in sys.modules,
    "leads": os.getsid(0) == os.getpid(),
}))
sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])
"""
WAITS = """
import os, sys, time
try:
    print(os.getpid(), flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(7)
"""


STARTS = """
import subprocess, sys
started = subprocess.Popen([sys.executable, "-m", "gangline.cli.train", "no.such=1"])
print(started.args[1:4], started.wait())
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Write the modules that the tests run into a folder; return the folder."""
    made = tmp_path / "site"
    made.mkdir()
    (made / "says.py").write_text(SAYS)
    (made / "waits.py").write_text(WAITS)
    (made / "starts.py").write_text(STARTS)
    (made / "raises.py").write_text("raise ValueError('the answer is not 42')\n")
    return made


def variables(site: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site), **more}


def start(module: str, *words: str, site: Path, **more: str) -> subprocess.Popen[str]:
    environment = variables(site, **more)
    command = warm.make_command(module, environment)
    assert str(warm.CLIENT) in command
    return subprocess.Popen(
        [*command, *words],
        cwd=site.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_warm_command_gets_arguments_directory_variables_and_path(site):
    (site / "sitecustomize.py").write_text("import sys; sys.customized = True\n")
    process = start("says", "3", "run.name=a b\n", site=site, SEEN="ü")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    said = json.loads(out)
    assert said["words"] == ["3", "run.name=a b\n"]
    assert (said["name"], said["cwd"], said["seen"]) == ("__main__", str(site.parent), "ü")
    assert said["path"][:2] == [str(site.parent), str(site)]
    assert said["customized"]
    assert said["torch"], "it was not forked from the server"
    assert said["leads"], "a signal to its group would reach the server"


def test_package_on_path_replaces_preloaded_package(site):
    """Check that a command imports the packages that a new Python process finds, not those that the server loaded."""
    (site / "yaml.py").write_text("ours = True\n")
    (site / "torch").mkdir()
    (site / "asks.py").write_text(
        "import sys, yaml\nprint(yaml.ours, 'yaml.nodes' in sys.modules, 'torch' in sys.modules)\n"
    )
    out, err = start("asks", site=site).communicate(timeout=120)
    assert out == "True False True\n", err


def test_warm_command_exits_like_a_new_python(site):
    for module, word in (("says", "0"), ("says", "what is wrong"), ("raises", "")):
        done = start(module, word, site=site)
        out, err = done.communicate(timeout=120)
        cold = subprocess.run(
            [sys.executable, "-m", module, word],
            cwd=site.parent,
            env=variables(site),
            capture_output=True,
            text=True,
        )
        assert done.returncode == cold.returncode
        assert err.splitlines()[-1:] == cold.stderr.splitlines()[-1:]
        assert len(out) > 0 or not cold.stdout


def test_signals_and_exit_status_pass_through(site):
    process = start("waits", site=site)
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[0] == "interrupted\n"
    assert process.returncode == 7
    killed = start("waits", site=site)
    os.kill(int(killed.stdout.readline()), signal.SIGKILL)
    assert killed.wait(120) == -signal.SIGKILL
    wait_until_none_lives(pid)


def test_warm_process_ends_with_its_client(site):
    process = start("waits", site=site)
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=120)
    wait_until_none_lives(pid)


ASKS = "import os, sys; print('xmlrpc.client' in sys.modules, os.environ.get('SEEN'))"


def test_own_server_has_only_given_modules_and_variables(site, monkeypatch):
    (site / "sitecustomize.py").write_text("import sys; sys.customized = True\n")
    (site / "asks.py").write_text(ASKS)
    plain, here = variables(site / "nothing"), variables(site, SEEN="1")
    monkeypatch.setenv("PYTHONPATH", str(site))
    server = warm.WarmServer(["xmlrpc.client"], {"SEEN": "1"})
    try:
        command = [*server.make_command("says", plain), "0"]
        done = subprocess.run(command, cwd=site, env=plain, capture_output=True, text=True, timeout=120)
        said = json.loads(done.stdout)
        assert not said["customized"]
        assert str(site) not in said["path"][1:]
        assert server.environment["SEEN"] == "1"
        for asked, told in ((server, "True 1"), (warm, "False 1")):
            command = asked.make_command("asks", here)
            assert str(warm.CLIENT) in command
            done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=120)
            assert done.stdout.strip() == told, done.stderr
    finally:
        server.close()


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "LD_PRELOAD"])
def test_startup_variables_force_a_cold_start(site, name):
    assert warm.make_command("says", variables(site, **{name: "2"})) == [sys.executable, "-m", "says"]


@pytest.mark.parametrize(
    "name",
    ["GOMP_SPINCOUNT", "KMP_INIT_AT_FORK"],  # set by gangline when it starts ranks, and by scikit-learn on import
)
def test_process_with_changed_variables_starts_warm(site, monkeypatch, name):
    monkeypatch.setenv(name, "1000")
    assert str(warm.CLIENT) in warm.make_command("says", variables(site))


def test_warm_run_matches_cold_run(runs):
    began = time.time()
    printed = runs.train("run.dir=warm", "parallel=ddp", "launch.processes=2", "run.deterministic=on")
    cold = runs.start("run.dir=cold", "parallel=ddp", "launch.processes=2", "run.deterministic=on")
    assert runs.finish(cold).replace("cold", "warm") == printed
    assert runs.read_curve("warm") == runs.read_curve("cold")
    warm_files, cold_files = (
        {str(path.relative_to(runs.directory / name)) for path in (runs.directory / name).rglob("*")}
        for name in ("warm", "cold")
    )
    assert warm_files == cold_files
    started = [json.loads((runs.directory / name / "provenance.json").read_text()) for name in ("warm", "cold")]
    assert started[0]["starts"][0]["versions"] == started[1]["starts"][0]["versions"]
    assert all((runs.directory / "warm" / file).stat().st_mtime >= began - 1 for file in warm_files)
    refused = runs.expect_refusal("run.steps=x")
    assert "run.steps=x: expected an integer" in refused


def test_nested_train_command_starts_warm(site):
    """Start `train` from a warm process, as launch=elastic and commands of `gangline` do."""
    out, err = start("starts", site=site).communicate(timeout=120)
    assert out == f"{['-I', '-S', str(warm.CLIENT)]} 2\n", err
    assert "there is no option no.such" in err


def test_rank_server_drops_inherited_log_handlers(tmp_path):
    """Check that the server drops inherited log handlers and output files, such as pytest's log file."""
    server, theirs, told = logging.getLogger("of.the.parent"), tmp_path / "theirs", tmp_path / "told"
    code = f"""
import logging, os, sys
reader, writer = os.pipe()
os.set_blocking(reader, False)
logging.getLogger("of.the.parent").error("not for the pipe")
logging.root.error("nor this")
print("nor this")
try:
    seen = os.read(reader, 99)
except BlockingIOError:
    seen = b""
open({str(told)!r}, "w").write(repr((seen, logging.root.handlers)))
"""
    pid = os.fork()
    if pid == 0:
        try:
            for logger in (server, logging.root):
                logger.addHandler(logging.FileHandler(theirs))
            sys.stdout = theirs.open("w", buffering=1)
            warm_server._be_the_server(code, [])
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert told.read_text() == "(b'', [])"
    assert theirs.read_text() == ""
