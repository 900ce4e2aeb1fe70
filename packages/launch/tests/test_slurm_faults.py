"""Slurm faults: a controller that restarts or answers late, array tasks, failed submits.

Scripts stand in for the Slurm commands.
"""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from gangline import UserError
from gangline.cli.train import main as train
from gangline.run.directory import RunDirectory
from gangline.run.ending import RunEnding, read_ending, write_ending
from gangline_launch import job as jobs
from gangline_launch.follow import follow, follow_all
from gangline_launch.job import SubmittedJob
from gangline_launch.mistakes import note_mistake
from gangline_launch.slurm import after, commands, requeues, submit
from gangline_launch.slurm.launcher import refuse_second
from gangline_launch.slurm.scheduler import SlurmScheduler
from gangline_launch.state import ENDED, WAITS, JobState, SchedulerError

AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
LATE = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
RUNS = "echo JobId=7 JobState=RUNNING Reason=None"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that installs a stand-in for a Slurm command, as in fake("sbatch", "echo 7").

    Each call of the stand-in becomes a line of `calls`.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in ("ASK_AGAIN", "ASK_AGAIN_MOST"):
        monkeypatch.setattr(commands, name, 0.01)
    monkeypatch.setattr(submit, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr("gangline_launch.follow.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("gangline_launch.follow.ASK_SECONDS", 0.01)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)

    def make(name: str, body: str) -> None:
        path = folder / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    commands.find_gpus_per_node.cache_clear()
    make("sinfo", "echo 'main* (null)'")
    make("squeue", "")
    return make


def once(tmp_path: Path, first: str, then: str) -> str:
    """Return a script that runs `first` only in its first call."""
    return f"if [ ! -e {tmp_path}/was ]; then touch {tmp_path}/was; {first}; fi\n{then}"


def calls(tmp_path: Path, name: str) -> list[str]:
    path = tmp_path / "calls"
    return [line for line in path.read_text().splitlines() if line.startswith(name)] if path.exists() else []


WORDS = [
    "recipe=tiny",
    "launch=slurm",
    "launch.nodes=2",
    "launch.processes=2",
    "launch.shared=[/]",
    "parallel=ddp",
]


@pytest.fixture
def out(tmp_path, monkeypatch, fake):
    """Submit a run as job 7, set the environment of that job, and return the run directory."""
    monkeypatch.chdir(tmp_path)
    fake("sbatch", "echo 7")
    fake("scontrol", "echo JobId=7 JobState=COMPLETED Reason=None ExitCode=0:0")
    assert train([*WORDS, "run.dir=out"]) == 1  # 1, because no rank has trained
    (tmp_path / "calls").unlink()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path / "out"


PREEMPTED = RunEnding(generation=1, reason="preempted", exit_code=75, requeue=True)


# --- end of the script ---


def test_last_array_task_requeues_only_itself(out, fake, tmp_path, monkeypatch):
    """End the last task of an array, whose SLURM_JOB_ID is the array's id: scontrol applies that id to all tasks."""
    for name, value in (("SLURM_ARRAY_JOB_ID", "7"), ("SLURM_ARRAY_TASK_ID", "2"), ("SLURM_JOB_ID", "7")):
        monkeypatch.setenv(name, value)
    fake("scontrol", RUNS)
    write_ending(out, PREEMPTED)
    assert after.main(str(out), "75") == 75
    assert [line.split()[-1] for line in calls(tmp_path, "scontrol")] == ["7_2", "7_2"]
    assert "requeue 7_2" in calls(tmp_path, "scontrol")[-1]


def test_record_has_the_exit_code_of_the_job(out, fake):
    """srun returns 138 if one node's agent ends before the other has written the ending."""
    fake("scontrol", RUNS)
    write_ending(out, PREEMPTED)
    assert after.main(str(out), "138") == 75
    assert requeues.read(out)[-1].code == 75


def test_requeue_is_retried_after_controller_restart(out, fake, tmp_path):
    fake("scontrol", once(tmp_path, AWAY, RUNS))
    write_ending(out, PREEMPTED)
    assert after.main(str(out), "75") == 75
    assert "scontrol requeue 7" in calls(tmp_path, "scontrol")


def test_unreachable_controller_ends_script_without_traceback(out, fake, monkeypatch, capsys):
    fake("scontrol", AWAY)
    monkeypatch.setattr(commands.retry_while_away, "__defaults__", (0.0,))
    write_ending(out, PREEMPTED)
    assert after.main(str(out), "75") == 75
    assert "is not restarted: slurm_load_jobs error: Unable to contact" in capsys.readouterr().out


def test_failed_resubmit_falls_back_to_requeue(out, fake, tmp_path):
    fake("scontrol", RUNS)
    fake("sbatch", "echo 'sbatch: error: Job violates accounting/QOS policy (job submit limit)' >&2; exit 1")
    write_ending(out, RunEnding(generation=1, reason="restart", exit_code=1, requeue=True, exclude=("n1",)))
    assert after.main(str(out), "1") == 1
    assert "scontrol requeue 7" in calls(tmp_path, "scontrol")
    assert requeues.read(out)[-1].then == "requeue"


def test_truncated_requeue_record_is_ignored(out, fake):
    fake("scontrol", RUNS)
    with (out / "launch" / requeues.FILE).open("a") as file:
        file.write('{"time": 1.0, "jo')
    write_ending(out, PREEMPTED)
    assert after.main(str(out), "75") == 75
    assert [line.then for line in requeues.read(out)] == [requeues.BEGIN, "requeue"]


def test_new_submit_resets_futile_starts(out, fake, tmp_path):
    fake("scontrol", RUNS)
    for _ in range(3):
        write_ending(out, PREEMPTED)
        after.main(str(out), "75")
    assert requeues.read(out)[-1].then == "end"  # after launch.futile_requeues=3 starts without a step
    fake("scontrol", "echo JobId=7 JobState=COMPLETED Reason=None ExitCode=0:0")
    assert train([f"resume={out}"]) == 1
    assert [line.then for line in requeues.read(out)] == [requeues.BEGIN]


def test_health_node_exclusions_are_added_to_user_exclusions(out, fake, tmp_path):
    with (out / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": 1, "start": None, "action": "exclude", "exclude": ["n4"]}) + "\n")
    assert train([f"resume={out}", "launch.options=['--exclude=n9']"]) == 1
    assert "--exclude=n9,n4" in calls(tmp_path, "sbatch")[-1]
    assert requeues.read_excluded_nodes(requeues.read(out)) == {"n4"}
    fake("scontrol", RUNS)
    write_ending(out, RunEnding(generation=1, reason="restart", exit_code=1, requeue=True, exclude=("n5",)))
    assert after.main(str(out), "1") == 1
    assert "--exclude=n9,n4,n5" in calls(tmp_path, "sbatch")[-1]


# --- submit ---


def test_unanswered_submit_finds_job_by_comment(out, fake, tmp_path, capsys):
    fake("sbatch", f'echo "${{@: -2:1}}" | sed s/--comment=// > {tmp_path}/comment; {LATE}')
    fake("squeue", f"echo 11 $(cat {tmp_path}/comment)")
    assert train([f"resume={out}"]) == 1
    assert jobs.require_job(out).id == "11"
    assert len(calls(tmp_path, "sbatch")) == 1


def test_sbatch_variables_do_not_override_script_options(out, fake, tmp_path, monkeypatch, capsys):
    """Remove variables that sbatch prefers to the script's options; without launch.account keep the site's default."""
    left_out = ("ARRAY_INX", "NO_REQUEUE", "PARTITION", "RESERVATION", "SIGNAL", "TIMELIMIT", "WAIT")
    for name in (*left_out, "ACCOUNT", "MEM_PER_NODE"):
        monkeypatch.setenv(f"SBATCH_{name}", "5")
    fake("sbatch", f"env > {tmp_path}/environment; echo 11")
    words = ["launch.partition=main", "launch.time=2:00:00", "launch.options=['--reservation=night']"]
    assert train([f"resume={out}", *words]) == 1
    assert capsys.readouterr().out.count(", ".join(f"SBATCH_{name}" for name in left_out)) == 1
    environment = (tmp_path / "environment").read_text().splitlines()
    assert {line for line in environment if line.startswith("SBATCH_")} == {"SBATCH_ACCOUNT=5", "SBATCH_MEM_PER_NODE=5"}
    assert f"HOME={os.environ['HOME']}" in environment


def test_submit_absent_from_queue_is_an_error(out, fake, capsys):
    fake("sbatch", LATE)
    fake("squeue", "echo 11 another")
    assert train([f"resume={out}"]) == 2
    assert "The job is not in the queue" in capsys.readouterr().err
    assert jobs.require_job(out).id == "7"


def test_unknown_submit_result_blocks_next_submit(out, fake, tmp_path, monkeypatch, capsys):
    fake("sbatch", f'echo "${{@: -2:1}}" | sed s/--comment=// > {tmp_path}/comment; {LATE}')
    fake("squeue", AWAY)
    monkeypatch.setattr(submit, "PATIENCE", 0.0)
    assert train([f"resume={out}"]) == 1
    assert "whether Slurm accepted the job is unknown" in capsys.readouterr().err
    with pytest.raises(UserError, match="may have a job already"):
        refuse_second(out)
    fake("squeue", f"echo 11 $(cat {tmp_path}/comment)")
    fake("scontrol", "echo JobId=11 JobState=PENDING Reason=Priority")
    with pytest.raises(UserError, match="has a job already: 11"):
        refuse_second(out)


def test_new_job_clears_previous_ending(out, fake):
    write_ending(out, RunEnding(generation=1, reason="done", exit_code=0))
    fake("scontrol", "echo JobId=7 JobState=CANCELLED Reason=None ExitCode=0:15")
    assert train([f"resume={out}"]) == 1
    assert read_ending(out) is None


def test_refused_submit_keeps_previous_ending(out, fake):
    write_ending(out, RunEnding(generation=1, reason="done", exit_code=0))
    fake("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert train([f"resume={out}"]) == 2
    assert read_ending(out).reason == "done"


def test_unwritable_submit_keeps_previous_ending(out, fake, monkeypatch):
    write_ending(out, RunEnding(generation=1, reason="done", exit_code=0))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gangline_launch.slurm.launcher.submit", full)
    assert train([f"resume={out}"]) == 2
    assert read_ending(out).reason == "done"


def test_sweep_with_different_job_sizes_is_refused(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fake("sbatch", "echo 7")
    words = [word for word in WORDS if not word.startswith(("parallel", "launch.processes"))]
    assert train(["-m", *words, "run.dir=out", "parallel=single,ddp", "run.device=cpu"]) == 2
    said = capsys.readouterr().err
    assert "out/00: 1 processes" in said
    assert "out/01: 2 processes" in said
    assert "parallel" in said
    assert not calls(tmp_path, "sbatch")
    assert not list(tmp_path.glob("out/*"))


# --- following jobs ---


class Forgetful:
    """Scheduler that gives the scripted answers in order, and repeats the last one."""

    def __init__(self, *said: JobState | SchedulerError) -> None:
        self.said, self.cancelled = list(said), False

    def get_state(self, job: SubmittedJob) -> JobState:
        one = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(one, Exception):
            raise one
        return one

    def cancel(self, job: SubmittedJob) -> None:
        self.cancelled = True


def test_follow_waits_for_unreachable_scheduler(out, capsys):
    write_ending(out, RunEnding(generation=1, reason="done", exit_code=0))
    scheduler = Forgetful(SchedulerError("away"), SchedulerError("away"), JobState(ENDED, "COMPLETED"))
    assert follow(out, scheduler, out) == 0
    assert capsys.readouterr().err.count("away; retrying") == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("runs", ["one", "several"])
def test_signal_detaches_follow_without_cancelling_job(out, capsys, signum, runs):
    class Asking(Forgetful):
        def get_state(self, job: SubmittedJob) -> JobState:
            os.kill(os.getpid(), signum)
            return super().get_state(job)

    scheduler, before = Asking(JobState(WAITS, "PENDING")), signal.getsignal(signum)
    found = follow(out, scheduler, out) if runs == "one" else follow_all([out], scheduler)
    assert found == (128 + signum if runs == "one" else [128 + signum])
    assert not scheduler.cancelled
    said = capsys.readouterr().out
    assert ("train: detached; job 7 continues." if runs == "one" else "train: detached; the jobs continue.") in said
    assert "attach" in said
    assert "cancel" in said
    assert signal.getsignal(signum) == before


def test_attach_does_not_cancel_job_that_cannot_start(out):
    scheduler = Forgetful(JobState(WAITS, "PENDING", "BadConstraints", hopeless="launch.constraint"))
    with pytest.raises(UserError, match="gangline launch cancel"):
        follow(out, scheduler, out, begun=True)
    assert not scheduler.cancelled


def test_failed_cancel_is_an_error(out, fake):
    fake("scancel", AWAY)
    fake("scontrol", RUNS)
    with pytest.raises(SchedulerError):
        SlurmScheduler().cancel(jobs.require_job(out))
    assert RunDirectory.open(out)


def test_unknown_gpu_count_refuses_submit(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands.find_gpus_per_node.cache_clear()
    fake("sinfo", AWAY)
    fake("sbatch", "echo 7")
    assert train([*WORDS, "run.dir=out"]) == 2
    assert "launch.gpus_per_node" in capsys.readouterr().err
    assert not calls(tmp_path, "sbatch")
    commands.find_gpus_per_node.cache_clear()


# --- user errors on a node ---


def test_node_user_error_sets_ending_unless_training_started(out):
    mistake = UserError("the code on the nodes is not the code of the submit.")
    (out / "launch" / "nodes").write_text("")
    (out / "events.jsonl").write_text("{}\n")
    os.utime(out / "launch" / "nodes", (100, 100))
    os.utime(out / "events.jsonl", (200, 200))
    note_mistake(out, mistake)
    assert read_ending(out) is None
    os.utime(out / "launch" / "nodes", (300, 300))
    note_mistake(out, mistake)
    assert (read_ending(out).reason, read_ending(out).requeue) == ("mistake", False)
