"""`launch=local`: start, monitoring, restart, logs and end of the ranks on this machine."""

from __future__ import annotations

import io
import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from gangline.config import Sidecar
from gangline.config.defaults import build_default_run
from gangline.config.sections import Recompute
from gangline.errors import PeerFailed, UserError
from gangline.launch import guard
from gangline.launch.devices import count_gpus
from gangline.launch.errors import is_lost_peer
from gangline.run.directory import RunDirectory
from gangline.run.ending import read_ending
from gangline_basics.launch import changed_data, forkserver, sidecars
from gangline_basics.launch.config import LocalLaunch
from gangline_basics.launch.local import start
from gangline_basics.launch.rank_log import Copied
from gangline_testkit.pool import close_all
from gangline_testkit.runs import build_small_run

HERE = Path(__file__).parent


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch) -> Path:
    """Return a run directory with a temporary folder, and make the rank functions importable."""
    (tmp_path / "temp").mkdir()
    multiprocessing.util.get_temp_dir()  # multiprocessing keeps its first temporary folder until this process ends
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(forkserver, "PRELOAD", forkserver.PRELOAD[:4])
    return tmp_path


def ranks(run_dir: Path, name: str, world: int) -> list[dict]:
    return [json.loads((run_dir / f"{name}-{rank}.json").read_text()) for rank in range(world)]


def log(run_dir: Path, rank: int) -> str:
    return (run_dir / "logs" / f"rank-{rank:05d}.log").read_text()


# --- start ---


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_start_and_find_each_other(run_dir, world):
    assert start(run_dir, world, target="launched:reduce") == 0
    found = ranks(run_dir, "reduce", world)
    assert [rank["sum"] for rank in found] == [world * (world + 1) / 2] * world
    assert len({rank["pid"] for rank in found}) == world
    cores = len(os.sched_getaffinity(0))
    assert {rank["threads"] for rank in found} <= {max(1, cores // world), None}
    for rank in range(world):
        assert log(run_dir, rank) == f"here is rank {rank}\n"
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == [f"rank-{r:05d}.log" for r in range(world)]
    assert list((run_dir / "temp").iterdir()) == []


def test_fork_server_preloads_only_needed_modules():
    """Import each preloaded name, because the server skips failed imports; torch._dynamo would double its time."""
    code = (
        "import importlib, signal, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print(*sys.modules)"
    )
    code += "; signal.setitimer(signal.ITIMER_REAL, 0)"  # the server's alarm, which could arrive at exit
    done = subprocess.run([sys.executable, "-c", code, *forkserver.PRELOAD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "gangline_basics.parallel.ddp" in loaded
    assert "torch._dynamo" not in loaded
    assert "hydra" not in loaded


def test_known_run_preloads_only_selected_parts():
    """Load torch.distributed.checkpoint, a third of all preloaded code, only for a run that saves."""
    off, torch_dcp = "gangline_basics.checkpoint.off", "gangline_basics.checkpoint.torch_dcp"
    found = forkserver.list_modules(build_default_run(checkpoint="off"))
    assert off in found
    assert torch_dcp not in found
    assert torch_dcp in forkserver.list_modules(build_default_run(checkpoint="torch"))
    names = [name for name in forkserver.PRELOAD[1:] if name not in forkserver.OF_SOME_PARTS]
    code = f"import sys, {', '.join([*names, off, 'gangline_basics.parallel.ddp'])}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch.distributed.checkpoint" not in done.stdout.split()


def test_fork_server_has_no_gpu_or_threads(run_dir):
    """Check that the server has one thread and thus no OpenMP team: a fork after a parallel region hangs."""
    forkserver.warm()
    assert start(run_dir, 1, target="launched:reduce") == 0  # after a start the server has imported everything
    pid = multiprocessing.forkserver._forkserver._forkserver_pid
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
    handles = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    assert not [handle for handle in handles if "nvidia" in handle]


@dataclass
class Heavy(LocalLaunch):
    """Launcher configuration that requires a module in every rank."""

    def preload(self, run):
        return ["xmlrpc.client"]


def test_modules_of_run_are_loaded_in_server(run_dir):
    assert forkserver.find_needed(build_default_run()) == set()
    assert forkserver.find_needed(build_default_run(run={"recompute": Recompute.full})) == {"torch._dynamo"}
    assert forkserver.find_needed(build_default_run(run={"compile": True})) == {"torch._dynamo"}
    run = build_default_run(run={"device": "cpu"})
    run.launch = Heavy()
    close_all()
    forkserver.warm(forkserver.find_needed(run))
    assert start(run_dir, 2, target="launched:loaded", args=("xmlrpc.client",)) == 0
    assert [rank["found"] for rank in ranks(run_dir, "loaded", 2)] == [True, True]
    server = multiprocessing.forkserver._forkserver
    pid = server._forkserver_pid
    forkserver.warm()
    assert server._forkserver_pid == pid  # the server has already loaded all requested modules


def test_launch_modules_import_no_torch():
    code = (
        "import sys; from gangline.launch import detected, signals; from gangline_basics.launch import starts, worker;"
        "from gangline_basics.launch import local, config;"
        "assert 'torch' not in sys.modules and 'hydra' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_log_holds_final_lines_without_control_characters():
    terminal, kept = io.StringIO(), io.StringIO()
    stream = Copied(terminal, kept)
    for text in ("plain\n", "\x1b[32mgreen\x1b[0m", " line\n", "10 %\r20 %\r", "\x1b[2K30 %", "\rdone\n", "unfinished"):
        stream.write(text)
    assert kept.getvalue() == "plain\ngreen line\ndone\n"
    assert terminal.getvalue().endswith("\x1b[2K30 %\rdone\nunfinished")
    for text in ("\n\x1b]0;title\x07bell\x07 and\x00 nul\n", "\x1b(Bset\n"):
        stream.write(text)
    assert kept.getvalue().endswith("done\nunfinished\nbell and nul\nset\n"), "no control characters"
    assert stream.isatty() is False


def test_log_excludes_progress_bar():
    """Print lines above rich's live display in a terminal, which is drawn again at the end and then erased."""
    screen, kept = io.StringIO(), io.StringIO()
    terminal = Console(file=Copied(screen, kept), force_terminal=True, width=60, highlight=False)
    with Live(console=terminal, auto_refresh=False, transient=True) as live:
        for number in range(3):
            live.update(f"bar {number}", refresh=True)
            terminal.print(f"line {number}")
    terminal.print("the end")
    terminal.print()
    assert kept.getvalue() == "line 0\nline 1\nline 2\nthe end\n\n"
    assert "bar 2" in screen.getvalue()


# --- failures ---


@pytest.mark.parametrize("culprit", [0, 3])  # rank 0, which serves the store, and the last; nightly: each of eight
def test_launcher_names_the_rank_that_raised(run_dir, capsys, culprit):
    assert start(run_dir, 4, target="launched:fail", args=(culprit, "raise")) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"train: rank {culprit} failed first: ValueError: the answer is not 42\n")
    assert "in end\n" in said
    assert "peer" not in said
    assert "ValueError" in log(run_dir, culprit)
    assert said.endswith(
        f"Log of the rank: {run_dir / 'logs' / f'rank-{culprit:05d}.log'}\nTo continue:  train resume={run_dir}\n"
    )


@pytest.mark.parametrize("culprit", [0, 3])
def test_launcher_names_the_killed_rank(run_dir, capsys, culprit):
    assert start(run_dir, 4, target="launched:fail", args=(culprit, "SIGKILL")) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"train: rank {culprit} failed first: it was killed by SIGKILL")
    assert "| about to go\n" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("shorter", [True, False])
def test_sigbus_names_the_data_file_that_was_truncated(run_dir, capsys, shorter):
    texts = run_dir / "texts"
    texts.mkdir()
    for name in "abc":
        (texts / name).write_bytes(b"text\n" * 10_000)
    made = run_dir / "made"
    RunDirectory.create(build_small_run(f"run.dir={made}", f"data.path={texts}")).unlock()
    assert start(made, 1, target="launched:truncate_mapped", args=(str(texts / "b"), shorter)) == 1
    said = capsys.readouterr().err
    assert "train: rank 0 failed first: it was killed by SIGBUS; a mapped file was truncated" in said
    changed = f"  Data files that changed since the start: {texts / 'b'} (10 bytes now)\n"
    assert (changed in said) == shorter
    assert ("  No file of the run's data has changed since the start.\n" in said) == (not shorter)


def test_sigbus_without_run_directory_is_reported(run_dir, capsys):
    path = run_dir / "file"
    path.write_bytes(b"text\n" * 10_000)
    assert start(run_dir, 1, target="launched:truncate_mapped", args=(str(path), True)) == 1
    said = capsys.readouterr().err
    assert "failed first: it was killed by SIGBUS; a mapped file was truncated" in said
    assert "since the start" not in said


def test_search_for_changed_data_ends_in_time(run_dir, monkeypatch):
    monkeypatch.setattr(changed_data, "SECONDS", 0.2)
    monkeypatch.setattr(changed_data, "_search", lambda run_dir, stop: time.sleep(2))
    before = time.monotonic()
    assert changed_data.describe_changed_data(run_dir) == ""
    assert time.monotonic() - before < 1


def test_peer_of_failed_rank_is_killed_without_waiting(run_dir, capsys):
    """Kill the peer, which reaches no step boundary, at once: torch would wait 30 seconds for it."""
    assert start(run_dir, 2, LocalLaunch(max_restarts=0), "launched:leave_behind") == 1
    assert "rank 1 failed first: ValueError" in capsys.readouterr().err
    assert "forcefully" not in (run_dir / "logs" / "agent.log").read_text()


def test_killed_fork_server_is_reported_without_traceback(run_dir, capsys):
    """Kill the server before it forks a rank; the next start begins a new server."""

    forkserver.warm()
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGSTOP)  # the server answers no request
    killed = threading.Timer(3.0, os.kill, (multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGKILL))
    killed.start()
    assert start(run_dir, 1, target="launched:reduce") == 1
    said = capsys.readouterr().err
    assert said.startswith("train: the fork server, which starts the ranks, is gone: it was killed by SIGKILL")
    assert "Traceback" not in said
    assert start(run_dir, 1, target="launched:reduce") == 0


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["raise", "SIGKILL", "SIGSEGV"])
@pytest.mark.parametrize("culprit", range(8))
def test_first_failed_rank_of_eight_is_named(run_dir, capsys, culprit, how):
    assert start(run_dir, 8, target="launched:fail", args=(culprit, how)) == 1
    assert capsys.readouterr().err.startswith(f"train: rank {culprit} failed first: ")


def test_user_error_of_rank_is_not_retried(run_dir, capsys):
    with pytest.raises(UserError) as caught:
        start(run_dir, 2, LocalLaunch(max_restarts=2), target="launched:refuse")
    assert str(caught.value) == "global batch 3 does not divide by 2.\n  batch.global_size=4"
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == ""  # the caller prints the message, once
    assert {path.name for path in run_dir.glob("started-*")} <= {"started-0-0.json", "started-0-1.json"}


def test_user_error_of_one_rank_ends_others(run_dir):
    with pytest.raises(UserError, match="the corpus is empty"):
        start(run_dir, 4, target="launched:fail", args=(2, "user"))


def test_run_returns_exit_code_of_ranks(run_dir, capsys):
    assert start(run_dir, 2, LocalLaunch(max_restarts=1), target="launched:ended") == 3
    said = "".join(path.read_text() for path in (run_dir / "logs").glob("rank-*.log"))
    assert said.count("a verdict stopped the run") in (1, 2)  # the other rank may be killed before it logs the verdict
    assert len(list((run_dir / "logs").glob("first-failure-*"))) == 1  # the ranks were not started again
    assert read_ending(run_dir).exit_code == 3
    assert "failed" not in capsys.readouterr().err


@pytest.mark.parametrize("most", [0, 1])
def test_exhausted_restarts_return_verdict_exit_code(run_dir, capsys, most):
    assert start(run_dir, 2, LocalLaunch(futile_restarts=most), target="launched:renew") == 3
    said = capsys.readouterr().err
    assert said.count("new workers were requested; ranks restarted\n") == most
    assert f"giving up after {most} restarts without progress past step 0" in said
    for word in ("bad-link at rank 0: 1 of 8 links", "no restart is left", f"train resume={run_dir}"):
        assert word in said
    assert "Traceback" not in said
    assert "failed first" not in said


def test_ranks_restart_after_failure(run_dir, capsys):
    assert start(run_dir, 4, LocalLaunch(max_restarts=1), target="launched:once", args=(2,)) == 0
    assert [(rank["sum"], rank["restart"]) for rank in ranks(run_dir, "reduce", 4)] == [(10, 1)] * 4
    assert "restart 1 of 1" in capsys.readouterr().err


def test_ranks_end_with_fork_server(run_dir):
    close_all()  # the ranks of another test's pool may come from this server
    assert start(run_dir, 2, target="launched:serverless") == 1
    for rank in ranks(run_dir, "started", 2):
        wait_until(lambda rank=rank: not guard.is_alive(rank["pid"]))


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:80"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection reset by peer"), False),
        (PeerFailed("the rank that reads the batches of this rank failed"), True),
    ],
)
def test_lost_peer_errors_are_recognized(error, lost):
    assert is_lost_peer(error) is lost
    outer = KeyError("later")
    outer.__context__ = error
    assert is_lost_peer(outer) is lost
    error.__cause__ = error
    assert is_lost_peer(error) is lost, "it has an end"


def test_process_end_is_detected_without_pidfd(monkeypatch):
    for forbidden in (False, True):
        if forbidden:
            monkeypatch.delattr(os, "pidfd_open")
        child = subprocess.Popen(["sleep", "100"])
        assert guard.wait_for_end(child.pid, 0.1) is False
        child.kill()
        child.wait()
        assert guard.wait_for_end(child.pid, 60) is True


# --- sidecars ---


def test_sidecars_outlive_restarts_and_end_with_owner(run_dir):
    (run_dir / "logs").mkdir()
    asked = [Sidecar(name="memory", target="launched:tick", args=("ticked",))]
    owner = subprocess.Popen(["sleep", "100"])
    first = sidecars.start(asked, run_dir, owner.pid)
    again = sidecars.start(asked, run_dir, owner.pid)  # as after a restart of the ranks
    assert [one.pid for one in again] == [one.pid for one in first]
    wait_until(lambda: (run_dir / "ticked").exists())
    sidecars.stop(again)
    assert first[0].process.wait(timeout=240) == -signal.SIGTERM
    anew = sidecars.start(asked, run_dir, owner.pid)
    assert anew[0].pid != first[0].pid
    owner.kill()
    owner.wait()
    assert anew[0].process.wait(timeout=240) == -signal.SIGTERM  # not SIGKILL: the sidecar may clean up


@pytest.mark.parametrize("left", ["torn", "another process", "another owner", "another machine", "nonsense"])
def test_stale_sidecar_record_kills_no_other_process(run_dir, left):
    """Write a record that does not match: process ids are reused, in a container already by the next start of a job."""
    (run_dir / "logs").mkdir()
    asked = [Sidecar(name="memory", target="launched:tick", args=("ticked",))]
    owner, stranger = subprocess.Popen(["sleep", "100"]), subprocess.Popen(["sleep", "100"])
    try:
        known = [sidecars._name(owner.pid), sidecars._name(stranger.pid)]
        (pid, born, space), (other, other_born, _) = known
        content = {
            "torn": '{"owner": [',
            "another process": json.dumps({"owner": known[0], "sidecar": [other, other_born + 1, space]}),
            "another owner": json.dumps({"owner": [pid, born - 1, space], "sidecar": known[1]}),
            "another machine": json.dumps({"owner": [pid, born, space + 1], "sidecar": [other, other_born, space + 1]}),
            "nonsense": "[5]",
        }[left]
        (run_dir / "logs" / f"sidecar-memory-{os.uname().nodename}.json").write_text(content)
        (one,) = sidecars.start(asked, run_dir, owner.pid)
        assert one.pid != stranger.pid
        sidecars.stop([one, replace(one, pid=stranger.pid, process=None, born=other_born + 1)])
        assert one.process is not None
        assert one.process.returncode is not None
        assert stranger.poll() is None
    finally:
        for process in (owner, stranger):
            process.kill()
            process.wait()


def test_nodes_on_one_machine_have_separate_sidecars(run_dir, monkeypatch):
    (run_dir / "logs").mkdir()
    asked = [Sidecar(name="memory", target="launched:tick", args=("ticked",))]
    owner, pids = subprocess.Popen(["sleep", "100"]), []
    try:
        for node in ("host/0", "host/1", "host/0"):
            monkeypatch.setenv("GANGLINE_NODE", node)
            pids += [one.pid for one in sidecars.start(asked, run_dir, owner.pid)]
        assert pids[0] == pids[2] != pids[1]
        logs = sorted(path.name for path in (run_dir / "logs").glob("*.log"))
        assert logs == ["sidecar-memory-host-0.log", "sidecar-memory-host-1.log"]
    finally:
        owner.kill()
        owner.wait()


def wait_until(true, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- configuration ---


def test_gpus_are_counted_without_a_driver(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    dev = str(tmp_path)
    assert count_gpus(None, {}, dev) == 3
    assert count_gpus("cpu", {}, dev) == 0
    assert count_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "2,0"}, dev) == 2
    assert count_gpus(None, {"CUDA_VISIBLE_DEVICES": ""}, dev) == 0
    assert count_gpus(None, {"CUDA_VISIBLE_DEVICES": "0"}, str(tmp_path / "none")) == 0


def test_process_count_follows_launch_and_strategy():
    def processes(**given):
        run = build_default_run(run={"device": "cpu"}, **given)
        return run.launch.count_ranks(run)

    assert processes() == 1
    assert processes(parallel="ddp") == 2
    assert processes(launch=LocalLaunch(processes=5)) == 5
