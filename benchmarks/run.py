"""Run the benchmarks of this folder, one after another: `python benchmarks/run.py [name ...]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = (
    "commands",
    "nanogpt",
    "overhead",
    "documents",
    "peers",
    "startup",
    "recovery",
    "data",
    "data_tokens",
    "data_remote",
    "tokenise",
    "near_duplicates",
    "data_parallel",
    "muon",
    "tensor",
    "pipeline",
    "composed",
    "moe",
    "moe_balance",
    "checkpoint",
    "track",
)


def main() -> int:
    code = 0
    for name in sys.argv[1:] or SCRIPTS:
        script = HERE / f"{name}.py"
        if not script.exists():
            print(f"unknown benchmark {name}; the benchmarks are {', '.join(SCRIPTS)}", file=sys.stderr)
            return 2
        print(f"\n== {name} ==", flush=True)
        code |= subprocess.run([sys.executable, str(script)]).returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
