"""Environment of sbatch, without SBATCH_* variables that would replace options of the script. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

# Options that only the launcher may set, even if the script omits them.
OWN = ("array", "error", "exclusive", "no-kill", "no-requeue", "signal", "wait")
# Options whose variable has another name, from "INPUT ENVIRONMENT VARIABLES" of https://slurm.schedmd.com/sbatch.html.
NAMES = {
    "array": ("ARRAY_INX",),
    "mem": ("MEM_PER_NODE",),
    "segment": ("SEGMENT_SIZE",),
    "switches": ("REQ_SWITCH", "WAIT4SWITCH"),
    "time": ("TIMELIMIT",),
}


def make_sbatch_environment(script: Path, environ: Mapping[str, str] = os.environ) -> tuple[dict[str, str], list[str]]:
    """Return the environment of sbatch, and the names of the variables removed from it.

    For Slurm, the command line overrides the environment, and the environment overrides the script.
    """
    script_options = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(), flags=re.MULTILINE)
    dropped = sorted(_list_variables([*OWN, *script_options]) & set(environ))
    return {name: value for name, value in environ.items() if name not in dropped}, dropped


def _list_variables(options: Iterable[str]) -> set[str]:
    """Return the environment variables that set these options of sbatch."""
    return {f"SBATCH_{name}" for option in options for name in NAMES.get(option, (option.upper().replace("-", "_"),))}
