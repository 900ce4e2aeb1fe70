"""Batch script of a run, rendered once, stored in RUN_DIR/launch/ and meant to be read. Torch-free."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.plugin.hooks import DISTRIBUTION
from gangline_launch import fabric, setup

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_launch.slurm.config import SlurmLaunch

FILE = "job.sh"


def render(config: SlurmLaunch, run: Run, run_dir: Path, tasks: int = 0) -> str:
    """Return the script of the run in `run_dir`, or of an array of `tasks` runs, listed in `run_dir`/launch/runs."""
    lines = ["#!/bin/bash", *(f"#SBATCH {word}" for word in list_sbatch_options(config, run, run_dir, tasks))]
    lines += [
        "",
        f"# {run.job.name}, by gangline {version(DISTRIBUTION)}. Slurm starts one agent per node. The agents use",
        "# the run directory to coordinate, start the ranks, and continue with the other nodes if a node is lost.",
        f"run_dir={shlex.quote(str(run_dir))}",
    ]
    if tasks:
        lines.append('run_dir=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$run_dir/launch/runs")')
    lines += [
        'mkdir -p "$run_dir/launch"',
        'rm -f "$run_dir/ending.json" "$run_dir/launch/nodes"  # files of an earlier start',
        "",
        "export PYTHONUNBUFFERED=1",
        *fabric.get_setup_lines(config.fabric),
        *setup.check_exit_codes(config.setup, quote_python(), '"$run_dir"'),
        "",
        "# Slurm's record of the nodes: their addresses and their places in the network topology.",
        'scontrol --oneliner show node "$SLURM_JOB_NODELIST" > "$run_dir/launch/nodes"',
        "",
        "# Each agent writes its own output file, so that the loss of a node breaks no connection.",
        f"srun {' '.join(list_srun_options(config, run_dir))} \\",
        f"    {' '.join(build_agent_command(config, run, run_dir))}",
        "",
        "# Requeue or end the job, as RUN_DIR/ending.json and earlier starts require.",
        f'{quote_python()} -P -m gangline_launch.slurm.after "$run_dir" $?',
    ]
    return "\n".join(lines) + "\n"


def quote_python() -> str:
    """Return the path of the submitting command's Python, quoted for the shell."""
    return shlex.quote(sys.executable)


def build_agent_command(config: SlurmLaunch, run: Run, run_dir: Path) -> list[str]:
    """Return the arguments of the command that starts the agent on each node, inside the container image if set."""
    command = [
        f"{'python' if config.image else quote_python()} -P -m gangline_launch.agent",
        '"$run_dir"',
        f"--nodes {config.format_elastic_nodes()}",
        f"--per-node {config.count_ranks_of_node(run)}",
        f"--processes {config.count_ranks(run)}",
    ]
    if config.image and config.container == "apptainer":
        binds = [f"--bind {shlex.quote(path)}" for path in list_mounts(config, run_dir)]
        command = ["apptainer exec --nv", *binds, shlex.quote(config.image), *command]
    return command


def list_mounts(config: SlurmLaunch, run_dir: Path) -> list[str]:
    """Return the mounts of the container image, the run directory first."""
    return [str(run_dir), *config.mounts]


def list_sbatch_options(config: SlurmLaunch, run: Run, run_dir: Path, tasks: int) -> list[str]:
    """Return the options of the #SBATCH lines."""
    fewest, _, _ = config.format_elastic_nodes().partition(":")
    most = config.count_max_nodes() + config.spares
    nodes = str(most) if int(fewest) == config.count_max_nodes() else f"{int(fewest) + config.spares}-{most}"
    output = "launch/slurm-%A_%a.out" if tasks else "launch/slurm-%j.out"
    options = {
        "job-name": f"gangline-{run.job.name}",
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "time": config.time,
        "constraint": config.constraint,
        "nodes": nodes,
        "ntasks-per-node": "1",
        "gpus-per-node": str(config.count_gpus_per_node(run)) if config.count_gpus_per_node(run) else None,
        "output": str(run_dir / output),
        "open-mode": "append",
        "signal": f"USR1@{round(config.signal_seconds)}" if config.signal_seconds else None,
    }
    words = [f"--{name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    words += [f"--switches={config.switches}" + (f"@{config.switches_wait}" if config.switches_wait else "")] * bool(
        config.switches
    )
    words += [f"--segment={config.segment}"] if config.segment else []
    words += ["--exclusive"] if config.exclusive else []
    words += ["--requeue", *(["--no-kill"] if config.survives() else [])]
    if tasks:
        running = f"%{config.most_running}" if config.most_running else ""
        words.append(f"--array=0-{tasks - 1}{running}")
    return [*words, *map(quote_option, config.options)]


def quote_option(option: str) -> str:
    """Quote the value of an option: "--reservation=my night" -> "--reservation='my night'"."""
    name, sign, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if sign else name


def list_srun_options(config: SlurmLaunch, run_dir: Path) -> list[str]:
    """Return the options of srun."""
    words = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
    words += ["--no-kill"] if config.survives() else []
    if config.image and config.container == "pyxis":
        pairs = [path if ":" in path else f"{path}:{path}" for path in list_mounts(config, run_dir)]
        words += [
            f"--container-image={shlex.quote(config.image)}",
            f"--container-mounts={shlex.quote(','.join(pairs))}",
        ]
    return [*words, '--output="$run_dir/launch/node-%n.out"', "--open-mode=append"]
