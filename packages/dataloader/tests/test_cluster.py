"""`gangline data prepare` on a cluster with datatrove and Slurm: stores do not depend on the number of tasks."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.prepare.cluster import LOGS, refuse_if_submitted
from gangline_dataloader.prepare.prepare_plan import SUBMITTED, WORK
from gangline_dataloader.prepare.run import prepare
from gangline_dataloader.prepare.settings import Settings

# Fake sbatch that runs a job to its end at submission, so that every job has waited for those before it.
SBATCH = """#!/bin/bash
for script; do :; done
grep -q merge_stats "$script" && { echo "Submitted batch job 99"; exit; }
count=$(ls "$JOBS" | wc -l); cp "$script" "$JOBS/$count"; echo "$@" >> "$JOBS/../arguments"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
export SLURM_NODELIST=here SLURM_JOB_ID=$((count + 1)) RUN_OFFSET=0
for SLURM_ARRAY_TASK_ID in $(seq 0 "$last"); do
    export SLURM_ARRAY_TASK_ID; bash "$script" >> "$JOBS/../log" 2>&1 || exit 1
done
echo "Submitted batch job $SLURM_JOB_ID"
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done
exec "$@"
"""


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a store except datatrove's logs, by relative path."""
    files = [path for path in folder.rglob("*") if path.is_file() and LOGS not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def small_tasks(monkeypatch):
    """Set small tasks and shards, so that few texts make several of each."""
    monkeypatch.setattr(Settings, "__init__", _small(Settings.__init__))


def _small(init):
    def made(self, **named):
        init(self, **{"task_bytes": 4000, "shard_tokens": 5000, **named})

    return made


def test_two_datatrove_tasks_match_one_process_bitwise(texts, tmp_path, small_tasks, capfd):
    words = ["prepare", str(texts), "--near-duplicates", "0.8"]
    alone, one, two = (tmp_path / name for name in ("alone", "one", "two"))
    assert commands.main([*words, "--workers", "1", "--out", str(alone)]) == 0
    assert len(list(alone.glob("shard-*.ends.npy"))) > 2
    for out, tasks in ((one, "1"), (two, "2")):
        capfd.readouterr()
        command = [*words, "--out", str(out), "--cluster", "local", "--tasks", tasks, "--workers", tasks]
        assert commands.main(command) == 0
        assert "documents" in capfd.readouterr().out
        assert contents(out) == contents(alone)
        assert len(list((out / LOGS / "task" / "logs").iterdir())) == int(tasks)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Put fake sbatch, srun, scontrol and squeue commands on PATH; return the folder of submitted jobs."""
    programs, jobs = tmp_path / "bin", tmp_path / "jobs"
    programs.mkdir(), jobs.mkdir()
    for name, content in (
        ("sbatch", SBATCH),
        ("srun", SRUN),
        ("scontrol", "#!/bin/bash\necho here\n"),
        ("squeue", f"#!/bin/bash\ncat {tmp_path}/queue\n"),
    ):
        (programs / name).write_text(content)
        (programs / name).chmod(stat.S_IRWXU)
    (tmp_path / "queue").write_text("")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("JOBS", str(jobs))
    return jobs


def test_slurm_jobs_prepare_the_store(texts, tmp_path, make_store, slurm, capsys):
    out = tmp_path / "out"
    command = ["prepare", str(texts), "--out", str(out), "--cluster", "slurm", "--tasks", "2"]
    with pytest.raises(UserError, match="partition and a time"):
        commands.main(command)
    options = [f"--slurm={one}" for one in ("partition=cpu", "time=1:00:00", "account=me", "mem_per_cpu_gb=3")]
    assert commands.main([*command, *options]) == 0
    assert "submitted jobs 1, 2, 3, 4; when all have ended" in capsys.readouterr().out
    assert contents(out) == contents(make_store(texts))
    scripts = [(slurm / str(number)).read_text() for number in range(4)]
    for script, last in zip(scripts, (1, 0, 1, 0), strict=True):
        for line in (f"--array=0-{last}", "--partition=cpu", "--account=me", "--mem-per-cpu=3G"):
            assert f"#SBATCH {line}" in script
    arguments = (tmp_path / "arguments").read_text().splitlines()
    waits = [f"--dependency=afterok:{number}" in line for number, line in enumerate(arguments)]
    assert waits == [False, True, True, True]
    # The store is complete: the call shows the report and submits no job.
    assert commands.main([*command, *options]) == 0
    assert "documents" in capsys.readouterr().out
    assert len(list(slurm.iterdir())) == 4


def test_prepare_refuses_while_slurm_jobs_are_running(tmp_path, slurm):
    work = tmp_path / "out" / WORK
    work.mkdir(parents=True)
    (work / SUBMITTED).write_text('{"jobs": ["41", "42"]}')
    refuse_if_submitted(work)  # the jobs have ended
    (tmp_path / "queue").write_text("42_[0-7]\n")
    with pytest.raises(UserError, match="jobs 42 of an earlier call"):
        prepare([], tmp_path / "out", Settings(), 1, lambda *_: None)


@pytest.mark.parametrize(("said", "refused"), [("Unable to contact slurm controller", True), ("Invalid job id", False)])
def test_prepare_refuses_if_slurm_does_not_answer(tmp_path, slurm, said, refused):
    work = tmp_path / "out" / WORK
    work.mkdir(parents=True)
    (work / SUBMITTED).write_text('{"jobs": ["41", "42"]}')
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/bash\necho 'error: {said}' >&2; exit 1\n")
    if not refused:
        return refuse_if_submitted(work)
    with pytest.raises(UserError, match=f"cannot determine whether jobs 41, 42 .*\n.*{said}"):
        refuse_if_submitted(work)
    (tmp_path / "bin" / "squeue").unlink()
    with pytest.raises(UserError, match="cannot determine"):
        refuse_if_submitted(work)


def test_submitted_jobs_are_recorded_after_failed_submission(texts, tmp_path, slurm):
    out = tmp_path / "out"
    sbatch = tmp_path / "bin" / "sbatch"
    idle = """#!/bin/bash
for script; do :; done
grep -q merge_stats "$script" && { echo "Submitted batch job 99"; exit; }
count=$(ls "$JOBS" | wc -l); [[ $count == 2 ]] && exit 1
touch "$JOBS/$count"; echo "Submitted batch job $((count + 1))"
"""
    sbatch.write_text(idle)
    options = [f"--slurm={one}" for one in ("partition=cpu", "time=1:00:00")]
    command = ["prepare", str(texts), "--out", str(out), "--cluster", "slurm", "--tasks", "2", *options]
    with pytest.raises(UserError, match="Slurm accepted jobs 1, 2 of the preparation and rejected the next job"):
        commands.main(command)
    (tmp_path / "queue").write_text("1_[0-1]\n2_0\n")
    with pytest.raises(UserError, match="jobs 1, 2 of an earlier call are still writing"):
        commands.main(command)


def test_invalid_cluster_options_are_refused(texts, tmp_path):
    for words in (["--tasks", "2"], ["--slurm", "time=1"], ["--cluster", "local", "--tasks", "0"]):
        with pytest.raises(UserError, match="--tasks"):
            commands.main(["prepare", str(texts), "--out", str(tmp_path / "out"), *words])
