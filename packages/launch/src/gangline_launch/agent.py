"""What a scheduler starts on each node: core's elastic agent, told what the scheduler knows.

python -m gangline_launch.agent RUN_DIR --nodes 4:5 --per-node 8 --processes 32
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from gangline import UserError

# By these core takes a process for a rank of Slurm's own; an agent is none.
_OF_A_RANK = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")


def main(argv: list[str]) -> int:
    """The agent of this node, to the end of the job; its exit code."""
    asked = parse(argv)
    from gangline.launch import run_node
    from gangline.tools import RunDirectory
    from gangline_launch.nodes import PlacedAddress, note_place, this_node

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
        return error.exit_code


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
