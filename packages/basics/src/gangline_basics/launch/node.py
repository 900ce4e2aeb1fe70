"""Agent process of one of several simulated nodes on this machine. Importing this module does not import torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gangline.errors import UserError


def main(run_dir: str, index: str, owner: str) -> int:
    """Run the agent of one of several nodes that `train` simulates on this machine, and return its exit code."""
    from gangline.launch import guard
    from gangline.launch.network import NAME, name_of_this_node
    from gangline.run.directory import RunDirectory
    from gangline.run.ending import read_ending
    from gangline_basics.launch.several import address_of, run_node

    guard.die_with(int(owner))
    machine = name_of_this_node()
    name = f"{machine}/{index}"
    os.environ[NAME] = name
    try:
        run = RunDirectory.open(run_dir).run()
        return run_node(Path(run_dir), run, name, address_of(run, machine))
    except UserError as error:
        ending = read_ending(run_dir)
        if ending is None or ending.evidence != "\n".join((error.what, *error.details)):
            print(f"train: agent {index}: {error}", file=sys.stderr, flush=True)
        return error.exit_code  # `train`, which started the agents, prints the ending


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
