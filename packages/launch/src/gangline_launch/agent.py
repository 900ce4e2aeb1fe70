"""Entry point of a node: starts gangline-basics' elastic agent with the node's name, address and network location.

python -m gangline_launch.agent RUN_DIR --nodes 4:5 --per-node 8 --processes 32
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path

from gangline import UserError
from gangline_launch.mistakes import report_mistake

# Variables that make `gangline.launch.detected` treat a process as a Slurm rank. An agent is not a rank.
_OF_A_RANK = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")
_OF_THE_STORAGE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.ENOTDIR)
_AGENT = "gangline_launch.agent:run"
EXIT_REQUEUE = 75  # exit code of a job to requeue: after a checkpoint on a stop signal, or with too few nodes
POD_INDEX = "GANGLINE_PLACE"  # completion index of the pod; set only in pods


def main(argv: list[str]) -> int:
    """Run the agent of this node to the end of the job; return its exit code. Checks run before torch is imported."""
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # ignore: there is no state to save yet
        signal.signal(signum, signal.SIG_IGN)
    options = parse(argv)
    from gangline.run.directory import RunDirectory
    from gangline_launch import clocks
    from gangline_launch.forked import fork_agent
    from gangline_launch.kubernetes.tries import refuse_more
    from gangline_launch.nodes import find_own_node

    for name in _OF_A_RANK:
        os.environ.pop(name, None)
    try:
        node = find_own_node(options.run_dir)
        directory = RunDirectory.open(options.run_dir)
        refuse_other_code(directory.list_changed_parts())
        run = directory.run()
        clocks.compare(options.run_dir, node.name, run.launch.lost_seconds)  # type: ignore[attr-defined]
        refuse_temporary_folder()
    except UserError as error:
        return report_mistake(options.run_dir, error)
    except OSError as error:
        if error.errno not in _OF_THE_STORAGE:
            raise
        what = f"node {os.uname().nodename} cannot write to the run directory {options.run_dir}: {error.strerror}."
        fix = "Free disk space there, mount the file system on that node, or grant yourself write permission."
        return report_mistake(
            options.run_dir, UserError(what, "All nodes of a job read and write the run directory.", fix)
        )
    code = fork_agent(_AGENT, (argv,), run)
    if code == EXIT_REQUEUE and (index := os.environ.get(POD_INDEX)) is not None:
        try:
            refuse_more(options.run_dir, index, run.launch.futile_requeues)  # type: ignore[attr-defined]
        except UserError as error:
            return report_mistake(options.run_dir, error, ends=True)
    return code


def refuse_temporary_folder() -> None:
    """Raise UserError if no socket can be created in TMPDIR; the forkserver needs one."""
    try:
        with Listener(family="AF_UNIX"):  # as multiprocessing creates it
            pass
    except OSError as error:
        where = os.environ.get("TMPDIR", "the default directory of temporary files")
        raise UserError(
            f"node {os.uname().nodename} cannot create a Unix socket in {where}: {error.strerror or error}.",
            "The server that forks the ranks needs a socket in TMPDIR, with a path of at most 107 characters.",
            "Set TMPDIR=/tmp in the environment of the job.",
        ) from error


def run(argv: list[str]) -> int:
    """Run the elastic agent in its own process; return its exit code."""
    options = parse(argv)
    from gangline.run.directory import RunDirectory
    from gangline_basics.launch.several import run_node
    from gangline_launch.nodes import find_own_node

    try:
        node = find_own_node(options.run_dir)
        run = RunDirectory.open(options.run_dir).run()
        run.launch = replace(run.launch, nodes=options.nodes, per_node=options.per_node, processes=options.processes)  # type: ignore[call-arg]
        return run_node(options.run_dir, run, node.name, node.address, node.place, machines=True)
    except UserError as error:
        return report_mistake(options.run_dir, error)


def refuse_other_code(changed: list[str]) -> None:
    """Raise UserError if `changed` is not empty: parts whose version differs from the version at the run's creation."""
    if changed:
        raise UserError(
            "the code on the nodes differs from the code that the run was submitted with.",
            *changed,
            "Rebuild launch.image with the submitted version, or submit from the Python environment of the nodes.",
        )


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments that the rendered script passes to the agent."""
    parser = argparse.ArgumentParser(prog="gangline_launch.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--nodes", required=True, help="minimum and maximum number of nodes, spares included: 4:5")
    parser.add_argument("--per-node", type=int, required=True, help="number of ranks per node")
    parser.add_argument(
        "--processes", type=int, required=True, help="maximum number of ranks that train, over all nodes"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
