"""`launch=slurm` batch script: golden files, and options refused before rendering. No Slurm is needed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gangline import UserError
from gangline.cli.train import main as train
from gangline.config.defaults import build_default_run
from gangline.run.ending import read_ending
from gangline_launch import setup
from gangline_launch.job import lock_submit
from gangline_launch.slurm import commands, script
from gangline_launch.slurm.config import SlurmLaunch, parse_slurm_time
from gangline_launch.slurm.submit import submit

GOLDEN = Path(__file__).parent / "golden"
AGAIN = os.environ.get("REGENERATE") == "1"
CASES = {
    "plain": SlurmLaunch(nodes="4", processes=8),
    "site": SlurmLaunch(
        nodes="4",
        gpus_per_node=8,
        spares=1,
        partition="gpu",
        account="llm",
        qos="long",
        time="1-00:00:00",
        constraint="h100&ib",
        setup=["module load cuda/13"],
        options=["--reservation=night"],
        fabric="gcp_tcpxo",
    ),
    "topology": SlurmLaunch(nodes="8", gpus_per_node=8, switches=2, switches_wait="12:00:00"),
    "block": SlurmLaunch(nodes="36", gpus_per_node=4, segment=18, exclusive=False),
    "elastic": SlurmLaunch(nodes="48:64", gpus_per_node=8, spares=2),
    "pyxis": SlurmLaunch(nodes="2", gpus_per_node=8, image="registry.site/llm+gangline:1", mounts=["/data", "/a:/b"]),
    "apptainer": SlurmLaunch(nodes="2", gpus_per_node=8, image="/images/gangline.sif", container="apptainer"),
}


def rendered(config: SlurmLaunch, tasks: int = 0) -> str:
    run = build_default_run(parallel="ddp", launch=config)
    text = script.render(config, run, Path("/shared/runs/one"), tasks)
    return text.replace(script.quote_python(), "PYTHON").replace(script.version("gangline-core"), "VERSION")


@pytest.mark.parametrize("name", CASES)
def test_batch_script_matches_golden_file(name):
    check(name, rendered(CASES[name]))


def test_sweep_script_matches_golden_file():
    check("sweep", rendered(SlurmLaunch(nodes="2", processes=2, most_running=3), tasks=16))


def check(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.sh"
    if AGAIN:
        path.write_text(text)
    assert text == path.read_text(), "REGENERATE=1 writes it anew"


def test_bash_parses_every_golden_script():
    for path in GOLDEN.glob("*.sh"):
        assert os.system(f"bash -n {path}") == 0


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Return the overrides of a small run, in an empty directory and without Slurm commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    commands.find_gpus_per_node.cache_clear()
    return ["recipe=tiny", "launch=slurm", "launch.nodes=2", "launch.processes=2", "parallel=ddp", "run.dir=out"]


def test_dry_run_prints_script_without_writing_files(words, tmp_path, capsys):
    assert train([*words, "launch.dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/bin/bash\n#SBATCH --job-name=")
    assert str(tmp_path / "out" / "launch" / "slurm-%j.out") in printed
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_script_for_absent_inputs(words, capsys):
    words = [*words, "data.path=/lustre/corpus", "validate.every=5", "validate.sets={web: {path: 's3://lake/web'}}"]
    assert train([*words, "launch.dry_run=true"]) == 0
    printed, said = capsys.readouterr()
    assert printed.startswith("#!/bin/bash\n#SBATCH --job-name=")
    assert "validate.sets.web.path=s3://lake/web, data.path=/lustre/corpus\n" in said
    assert said.count("note: not checked") == 1
    assert train(words) == 2
    assert "data.path=/lustre/corpus names no files." in capsys.readouterr().err


def test_dry_run_checks_data_of_this_machine(words, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("short")
    assert train([*words, "data.path=short.txt", "launch.dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert "data.path=short.txt is too short." in said
    assert "not checked" not in said


def test_sweep_dry_run_prints_one_script(words, tmp_path, capsys):
    assert train(["-m", *words, "run.seed=1,2,3", "launch.dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("#!/bin/bash") == 1
    assert "#SBATCH --array=0-2" in printed
    assert not list(tmp_path.glob("out/*"))


def test_missing_sbatch_points_to_login_node(words, tmp_path, capsys):
    assert train([*words, "launch.shared=[/]"]) == 2
    said = capsys.readouterr().err
    assert "sbatch, which is not installed on this machine" in said
    assert "login node" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("launch.nodes=3:2", "the minimum 3 exceeds the maximum 2"),
        ("launch.agents=1", "the scheduler starts one agent per node"),
        ("launch.time=soon", "is not a Slurm time"),
        ("launch.options=[night]", "does not have the form --name or --name=value"),
        ("launch.segment=4", "does not divide launch.nodes=2"),
        ("launch.time=9000", "YAML reads an unquoted 2:30:00"),
        ("launch.switches_wait=90", "launch.switches_wait=90 is not a Slurm time"),
        ("launch.switches_wait=60", "has no effect without launch.switches"),
        ("launch.fabric=token_ring", "launch.fabric"),
        ("launch.time='2:00'", "must be longer than launch.signal_seconds=120"),
        ("launch.time='2:01'", ""),
        ("launch.options=['--nodes=3']", "--nodes is set by launch.nodes"),
        ("launch.options=['--comment=mine']", "--comment is set by the launcher itself"),
        ('launch.partition="a\nb"', r"launch.partition='a\nb' contains '\n'"),
        ("run.name='back\\slash'", "sbatch removes backslashes"),
        ('run.name="a\rb"', "must be printable text in one line"),
        ('run.name="a\u2028b"', "must be printable text in one line"),
        ("launch.options=['--wckey=a\\b']", "sbatch removes backslashes"),
        ("run.name='a JobState=FAILED'", "contains 'JobState='"),
        ("run.name='lr=1 seed=2'", ""),
        ("run.dir=of-%j", "contains a %"),
        ("run.dir='a\\b'", r"contains '\\'"),
        ("run.dir=s3://bucket/one", "which object stores do not support"),
        ("launch.gpus_per_node=0", ""),
    ],
)
def test_invalid_slurm_options_are_refused_before_submit(words, word, said, capsys):
    assert train([*words, word, "launch.dry_run=true"]) == (2 if said else 0)
    assert said in capsys.readouterr().err


def test_segment_must_divide_spare_nodes(words, capsys):
    assert train([*words, "launch.segment=2", "launch.spares=1", "launch.dry_run=true"]) == 2
    assert "launch.segment=2 does not divide launch.nodes=2 and launch.spares=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("2:30", 150),
        ("2:30:00", 9000),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("0-0:0:7", 7),
        ("soon", None),
        (None, None),
    ],
)
def test_slurm_time_formats_are_parsed(time, seconds):
    assert parse_slurm_time(time) == seconds


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["if true; then", "fi"], "launch.setup contains 'if true; then', which is not a complete bash command"),
        (["echo 'x"], "launch.setup contains"),
        (["cat <<EOF"], "here-document"),
        (["echo \\"], "the entry ends with a backslash"),
        (["if true; then\n  echo x\nfi  # one entry", "sleep 0 &"], ""),
    ],
)
def test_setup_entry_must_be_a_complete_command(entries, said):
    config = SlurmLaunch(nodes="2", processes=2, gpus_per_node=0, setup=entries)
    found = config.check(build_default_run(parallel="ddp", launch=config))
    assert said in " ".join(word for problem in found for word in (problem.what, *problem.format_details()))
    assert bool(found) == bool(said)


def test_failed_setup_entry_ends_job_as_mistake(tmp_path):
    """Run the lines in bash: the failing entry has a comment, and the failed command before it is handled by `||`."""
    lines = setup.check_exit_codes(
        ["false || true", "export A=1", "no_such_command '1'  # a comment", "touch after"], sys.executable, '"$run_dir"'
    )
    (tmp_path / "ending.json").write_text("{}")
    run = ["bash", "-c", "\n".join([f"run_dir={tmp_path}", *lines])]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "no_such_command: command not found" in done.stderr
    assert "launch.setup failed: no_such_command '1'  # a comment" in done.stderr
    assert (read_ending(tmp_path).reason, read_ending(tmp_path).exit_code) == ("mistake", 2)
    assert not (tmp_path / "after").exists()


def test_sbatch_option_with_spaces_is_quoted():
    assert script.quote_option("--reservation=the night's") == "--reservation='the night'\"'\"'s'"
    assert script.quote_option("--hold") == "--hold"


def test_concurrent_submit_is_refused(words, tmp_path):
    with lock_submit(tmp_path), pytest.raises(UserError, match="another command is submitting"), lock_submit(tmp_path):
        pass
    with lock_submit(tmp_path):
        pass


def test_storage_error_is_not_reported_as_concurrent_submit(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="cannot write the files of the job"), lock_submit(tmp_path):
        raise BlockingIOError(errno.EAGAIN, "the storage is busy")

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(UserError, match="cannot be locked: No locks available"), lock_submit(tmp_path):
        pass


def test_full_disk_at_submit_is_reported(words, tmp_path, capsys, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gangline_launch.slurm.submit.write_whole", full)
    assert train([*words, "launch.shared=[/]"]) == 2
    said = capsys.readouterr().err
    assert "cannot write the files of the job" in said
    assert "No space left on device" in said
    assert not (tmp_path / "out").exists()


def test_job_that_cannot_be_recorded_is_cancelled(tmp_path, monkeypatch):
    for name in ("sbatch", "scancel"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} $* >> {tmp_path}/asked\necho 7\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")

    def full(run_dir, job):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gangline_launch.job.write_job", full)
    (tmp_path / "job.sh").write_text("#!/bin/bash\n")
    with pytest.raises(OSError, match="No space"):
        submit(tmp_path / "job.sh", [tmp_path])
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "scancel 7"
    (tmp_path / "scancel").write_text("#!/bin/sh\necho no >&2\nexit 1\n")
    with pytest.raises(UserError, match="job 7 was submitted"):
        submit(tmp_path / "job.sh", [tmp_path])


def test_more_ranks_than_node_gpus_are_refused(words, capsys):
    assert train([*words, "launch.processes=4", "launch.gpus_per_node=1", "launch.dry_run=true"]) == 2
    assert "need 2 GPUs per node, and a node has 1" in capsys.readouterr().err


def test_gpu_run_is_submitted_from_cpu_machine(words, capsys):
    gpus = ["run.device=cuda", "launch.processes=null", "launch.gpus_per_node=8"]
    assert train([*words, *gpus, "launch.dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert "--gpus-per-node=8" in printed
    assert "--processes 16" in printed


def test_sbatch_error_names_option_to_set(tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\necho 'sbatch: error: Batch job submission failed: Invalid account or account/partition "
        "combination specified' >&2\nexit 1\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(UserError, match="Invalid account") as caught:
        commands.submit("job.sh")
    assert any("launch.account=" in line for line in caught.value.details)


def test_gpus_without_a_process_are_refused(capsys):
    words = ["recipe=quick", "launch=slurm", "launch.nodes=2", "launch.gpus_per_node=8", "launch.dry_run=true"]
    assert train([*words, "parallel=single"]) == 2
    assert "the job would reserve 16 GPUs, and the run has 1 process." in capsys.readouterr().err
    assert train([*words, "parallel=single", "launch.processes=1"]) == 0
