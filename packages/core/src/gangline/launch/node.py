"""The process of an agent that plays one of several nodes on this machine. Torch-free at its top."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gangline.errors import UserError


def main(run_dir: str, index: str, owner: str) -> int:
    """The agent of one of several nodes that `train` plays on this machine."""
    from gangline.launch import guard
    from gangline.launch.nodes import NAME, name_of_this_node
    from gangline.launch.several import HERE, run_node
    from gangline.rundir import RunDirectory

    guard.die_with(int(owner))
    name = f"{name_of_this_node()}/{index}"
    os.environ[NAME] = name
    try:
        return run_node(Path(run_dir), RunDirectory.open(run_dir).run(), name, HERE)
    except UserError as error:
        return error.exit_code  # the command that started the agents tells it


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
