"""What a scheduler starts on each node: core's elastic agent, told what the scheduler knows.

python -m gangline_launch.agent RUN_DIR --nodes 4:5 --per-node 8 --processes 32
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from gangline import UserError

# By these core takes a process for a rank of Slurm's own; an agent is none.
_OF_A_RANK = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")
_OWNER = "GANGLINE_AGENT_OWNER"
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *_NOTICES)


def main(argv: list[str]) -> int:
    """The agent of this node, to the end of the job; its exit code.

    A scheduler signals the whole process group of what it started. So the agent is in a group of its own, and it alone
    is told: a rank that hears of a stop twice would end without a save.
    """
    parse(argv)
    if _OWNER in os.environ:
        return run(argv)
    for signum in _NOTICES:  # before there is anything to save they mean nothing
        signal.signal(signum, signal.SIG_IGN)
    variables = {**os.environ, _OWNER: str(os.getpid())}
    command = [sys.executable, "-m", "gangline_launch.agent", *argv]
    agent = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
    for signum in _HANDED_ON:
        signal.signal(signum, lambda signum, frame: agent.send_signal(signum))
    code = agent.wait()
    return code if code >= 0 else 128 - code


def run(argv: list[str]) -> int:
    """In the agent's own process."""
    asked = parse(argv)
    from gangline.launch import die_with, run_node
    from gangline.tools import RunDirectory
    from gangline_launch.nodes import PlacedAddress, note_place, this_node

    die_with(int(os.environ.pop(_OWNER)))
    for name in _OF_A_RANK:
        os.environ.pop(name, None)
    try:
        node = this_node(asked.run_dir)
        directory = RunDirectory.open(asked.run_dir)
        refuse_other_code(directory.changed_parts())
        run = directory.run()
        run.launch = replace(run.launch, nodes=asked.nodes, per_node=asked.per_node, processes=asked.processes)  # type: ignore[call-arg]
        note_place(asked.run_dir, node)
        return run_node(asked.run_dir, run, node.name, PlacedAddress(node.address, node.place))
    except UserError as error:
        print(f"train: {error}", file=sys.stderr, flush=True)
        note_mistake(asked.run_dir, error)
        return error.exit_code


def note_mistake(run_dir: Path, error: UserError) -> None:
    """ending.json, unless the others have begun without this node or one of them has said why it ends.

    Both times are those of the file system that all nodes share.
    """
    from gangline.tools import RunEnding, read_ending, write_ending

    events, began = run_dir / "events.jsonl", run_dir / "launch" / "nodes"
    others_train = events.exists() and began.exists() and events.stat().st_mtime > began.stat().st_mtime
    if run_dir.is_dir() and not others_train and read_ending(run_dir) is None:
        text = "\n".join((error.what, *error.details))
        write_ending(run_dir, RunEnding(generation=0, reason="mistake", exit_code=error.exit_code, evidence=text))


def refuse_other_code(changed: list[str]) -> None:
    """Parts of another version than those that the run was made with. Raises UserError."""
    if changed:
        raise UserError(
            "the code on the nodes is not the code that the run was submitted with.",
            *changed,
            "Build the image from this version, or submit from the environment that the nodes have.",
        )


def parse(argv: list[str]) -> argparse.Namespace:
    """What the rendered script says."""
    parser = argparse.ArgumentParser(prog="gangline_launch.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--nodes", required=True, help="the fewest and the most, spares among them: 4:5")
    parser.add_argument("--per-node", type=int, required=True, help="ranks of each node")
    parser.add_argument("--processes", type=int, required=True, help="the most that train, on all nodes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
