"""Ranks started by torchrun or Slurm: detection, one composed configuration, restart and requeue."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.comm.job_store import ADDRESS
from gangline.config.defaults import build_default_run
from gangline.errors import UserError
from gangline.launch import requeue
from gangline.launch.detected import detect, parse_first_host, parse_tasks_per_node
from gangline.run.directory import RunDirectory
from gangline.run.events import read_events
from gangline_basics.launch import forkserver
from gangline_testkit import warm
from gangline_testkit.ports import free_port
from gangline_testkit.processes import kill

HERE = Path(__file__).parent
JOBS = itertools.count(1000)  # Slurm job ids


# --- detection ---


def slurm(rank: int, world: int, **more: str) -> dict[str, str]:
    """Return the environment variables of an `srun` task that gangline reads."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_TASKS_PER_NODE": str(world),
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        **more,
    }


def test_slurm_task_detects_rank_and_world():
    environ = slurm(5, 7, SLURM_LOCALID="1", SLURM_NODEID="1", SLURM_RESTART_COUNT="2")
    environ.update(SLURM_STEP_NODELIST="gpu[003-004]", SLURM_STEP_TASKS_PER_NODE="4,3")
    job = detect(environ)
    assert (job.agent, job.rank, job.world, job.local_rank, job.local_world) == ("slurm", 5, 7, 1, 3)
    assert (job.address, job.restarts) == ("gpu003", 2)
    assert 20000 <= job.port < 32000
    assert job.get_environment()["LOCAL_WORLD_SIZE"] == "3"


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, slurm(0, 1), {"RANK": "0"}])
def test_detect_without_agent_returns_none(environ):
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("n[1-4]", "n1"), ("gpu[003-007,9],x1", "gpu003"), ("x1,gpu[3-4]", "x1"), ("r[2,5]n[01-03]", "r2n01")],
)
def test_slurm_node_list_first_host_is_parsed(hosts, first):
    assert parse_first_host(hosts) == first


def test_slurm_tasks_per_node_are_expanded():
    assert parse_tasks_per_node("4(x2),3,2(x2)") == [4, 4, 3, 2, 2]


# --- Slurm ---


@pytest.fixture
def srun(tmp_path, monkeypatch):
    """Return a function that runs tasks as `srun` does, and returns their exit codes and their output.

    The tasks are forked from a server that has loaded torch.
    """
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr(forkserver, "PRELOAD", forkserver.PRELOAD[:4])
    forkserver.warm()
    import launched

    def run(*arguments: str, started: int = 2, **environ: str) -> tuple[list[int | None], list[str]]:
        environ = {"SLURM_JOB_ID": str(next(JOBS)), "MASTER_PORT": str(free_port()), **environ}
        tasks = [
            multiprocessing.get_context("forkserver").Process(
                target=launched.task, args=(str(tmp_path), slurm(rank, 2, **environ), list(arguments))
            )
            for rank in range(started)
        ]
        for one in tasks:
            one.start()
        for one in tasks:
            one.join(180)
        codes = [one.exitcode for one in tasks]
        for one in tasks:
            one.kill()
        return codes, [(tmp_path / f"printed-{rank}").read_text() for rank in range(started)]

    return run


def test_slurm_tasks_train_together(srun, tmp_path):
    codes, printed = srun("out", "agent", "reduce")
    assert codes == [0, 0], printed
    assert [json.loads((tmp_path / "out" / f"reduce-{rank}.json").read_text())["sum"] for rank in range(2)] == [3, 3]
    assert printed == ["here is rank 0\n", ""]
    assert (tmp_path / "out" / "logs" / "rank-00001.log").read_text() == "here is rank 1\n"


def test_rank_with_idle_thread_pool_exits():
    made = "from concurrent.futures import ThreadPoolExecutor as Pool; pool = Pool(2); print(pool.submit(int).result())"
    code = f"from gangline_basics.launch.worker import leave; {made}; leave(0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert ended.stdout == "0\n"


def test_rank_0_refusal_ends_ranks_with_one_message(srun):
    codes, printed = srun("refused", "agent", "reduce")
    assert codes == [2, 2]
    assert printed == ["train: curves=on is not available here.\n  pip install gangline-curves\n", ""]


@pytest.mark.parametrize("address", ["", "0.0.0.0"])
def test_master_port_in_use_is_user_error(srun, address):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        where = {"MASTER_PORT": str(port), ADDRESS: address}
        codes, [printed] = srun("out", "agent", "reduce", started=1, **where)
    assert codes == [2], printed
    assert printed.startswith(f"train: port {port} at 127.0.0.1 is used by another process.\n")
    assert "MASTER_PORT=" in printed
    assert "Traceback" not in printed


def test_only_first_failed_rank_reports_failure(srun):
    codes, printed = srun("out", "agent", "fail", '[1, "raise"]')
    assert codes == [1, 1]
    assert printed[0] == ""
    assert printed[1].startswith("train: rank 1 failed first: ValueError: the answer is not 42\nTraceback")


@pytest.mark.parametrize("place", ["out", "fresh"])
def test_user_error_of_rank_leaves_no_run_directory(srun, tmp_path, place):
    codes, printed = srun(place, "agent", "fail", '[1, "user"]')
    assert codes == [1, 2]
    assert printed == ["", "train: the corpus is empty.\n  data.path=... names files to read\n"]
    assert not [path.name for path in tmp_path.iterdir() if path.is_dir()]


def test_requeued_slurm_job_continues_in_run_directory(srun, tmp_path):
    for restart in ("0", "1"):
        codes, printed = srun("fresh", "agent", "reduce", SLURM_JOB_ID="77", SLURM_RESTART_COUNT=restart)
        assert codes == [0, 0], printed
    assert len(list((tmp_path / "runs").glob("*/config.yaml"))) == 1
    assert srun("fresh", "agent", "reduce", SLURM_JOB_ID="78")[0] == [0, 0]
    assert len(list((tmp_path / "runs").glob("*/config.yaml"))) == 2


def test_requeued_slurm_job_logs_previous_failure(srun, tmp_path):
    """Start a Slurm job again: SLURM_RESTART_COUNT alone tells the ranks that this is not the first start."""
    for restart in ("0", "1"):
        about = {"SLURM_JOB_ID": "79", "SLURM_RESTART_COUNT": restart}
        assert srun("fresh", "agent", "fail", '[1, "raise"]', **about)[0] == [1, 1]
    [config] = (tmp_path / "runs").glob("*/config.yaml")
    told = [line for line in read_events(config.parent) if line["event"] == "launch"]
    assert [(line["why"], line["after"], line["futile"]) for line in told] == [("start", "", 0), ("start", "bug", 1)]
    assert told[1]["evidence"] == "rank 1 failed first: ValueError: the answer is not 42"


def test_requeued_single_task_finds_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "1"}
    assert requeue.find_earlier(*requeue.identify_job(environ)) is None
    begun = RunDirectory.create(build_default_run(run={"dir": "elsewhere"}, track=[]))
    requeue.remember(requeue.identify_job(environ)[0], begun.path)
    assert requeue.find_earlier(*requeue.identify_job(environ)).path == tmp_path / "elsewhere"
    assert requeue.find_earlier(*requeue.identify_job({**environ, "SLURM_RESTART_COUNT": "0"})) is None
    assert requeue.find_earlier(*requeue.identify_job({**environ, "SLURM_JOB_ID": "6"})) is None
    assert requeue.find_earlier(*requeue.identify_job({})) is None
    monkeypatch.setattr("sys.argv", ["train", "another=run"])
    assert requeue.find_earlier(*requeue.identify_job(environ)) is None


def test_requeue_note_replaced_by_link_keeps_target(tmp_path, monkeypatch):
    """Replace the note by a link, as any user with write access to the working directory could."""
    monkeypatch.chdir(tmp_path)
    Path("thesis.txt").write_text("my thesis")
    requeue.remember("slurm-5", "out")
    [note] = requeue.NOTES.iterdir()
    note.unlink()
    note.symlink_to(tmp_path / "thesis.txt")
    with pytest.raises(UserError, match=f"{note} is a symbolic link to .*thesis.txt.*\n.*\n  rm -r {note}"):
        requeue.find_earlier("slurm-5", 0)
    requeue.remember("slurm-5", "out")
    assert Path("thesis.txt").read_text() == "my thesis"
    assert note.read_text() == str(tmp_path / "out")


@pytest.mark.skipif(os.geteuid() != 0, reason="files of other users are made by root alone")
@pytest.mark.parametrize("planted", ["folder", "note"])
def test_requeue_note_of_another_user_is_refused(tmp_path, monkeypatch, planted):
    monkeypatch.chdir(tmp_path)
    requeue.remember("slurm-5", RunDirectory.create(build_default_run(run={"dir": "out"}, track=[])).path)
    [note] = requeue.NOTES.iterdir()
    assert requeue.find_earlier("slurm-5", 1).path == tmp_path / "out"
    path = requeue.NOTES if planted == "folder" else note
    os.chown(path, 61001, -1)
    with pytest.raises(UserError, match=f"{path} belongs to user 61001"):
        requeue.find_earlier("slurm-5", 1)


# --- torchrun ---


@pytest.fixture(scope="module")
def torchruns(tmp_path_factory):
    """Yield the torchrun processes of all tests, started together and forked from a server that has torch."""
    root = tmp_path_factory.mktemp("torchrun")
    before = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *([before] if before else [])]),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    agent = [*warm.make_command("torch.distributed.run", environment), "--no-python", "--nproc-per-node"]
    rank = warm.make_command("launched", environment)
    nodes = ["1", "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=9"]
    asked = {
        "restart": [[*agent, "2", "--max-restarts=1", *rank, "fresh", "agent", "once", "[1]"]],
        "refused": [[*agent, "2", *rank, "refused", "agent", "reduce"]],
        "nodes": [[*agent, *nodes, *rank, "out", "agent", "reduce"]] * 2,
    }
    started = {}
    for name, commands in asked.items():
        (root / name).mkdir()
        started[name] = [
            subprocess.Popen(
                command,
                cwd=root / name,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=environment,
            )
            for command in commands
        ]
    yield root, started
    for process in (process for processes in started.values() for process in processes):
        if process.poll() is None:
            kill(process)


def finished(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    ends = [process.communicate(timeout=240) for process in processes]
    return [(process.returncode, *end) for process, end in zip(processes, ends, strict=True)]


def test_torchrun_restarts_ranks_in_same_run_directory(torchruns):
    root, started = torchruns
    [(code, out, err)] = finished(started["restart"])
    assert code == 0, out + err
    [run_dir] = [path.parent for path in (root / "restart" / "runs").glob("*/config.yaml")]
    found = [json.loads((run_dir / f"reduce-{rank}.json").read_text()) for rank in range(2)]
    assert [(rank["sum"], rank["restart"]) for rank in found] == [(3, 1), (3, 1)]


def test_two_torchrun_agents_form_one_run(torchruns):
    root, started = torchruns
    ends = finished(started["nodes"])
    assert [code for code, _, _ in ends] == [0, 0], ends
    found = [json.loads((root / "nodes" / "out" / f"reduce-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["sum"] for rank in found] == [3, 3]
    assert sorted(out for _, out, _ in ends) == ["", "here is rank 0\n"]


def test_torchrun_refusal_is_printed_once(torchruns):
    _, started = torchruns
    [(code, _, err)] = finished(started["refused"])
    assert code == 1  # exit code of torchrun; its table of failures contains the exit code of the ranks
    assert err.count("train: curves=on is not available here.") == 1
    assert "exitcode  : 2" in err
