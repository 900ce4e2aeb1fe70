"""Measure wall and CPU seconds of the commands that must answer at once, and whether they import torch.

    python benchmarks/commands.py annotated_types pydantic

Numbers are medians of 15 cold processes, interleaved. Goals: 0.35 s of wall time for lists and help, 1 s for `--cfg
job`. Libraries in the arguments are imported alone, to be compared with `python -c pass`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "gangline plugins": (["-m", "gangline.cli.main", "plugins"], 0.35),
    "train --help": (["-m", "gangline.cli.train", "--help"], 0.35),
    "train --cfg job": (["-m", "gangline.cli.train", "--cfg", "job"], 1.0),
}


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Return (wall, CPU) seconds of a process."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def imports_torch(arguments: list[str]) -> bool:
    told = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    return any(line.rsplit("|", 1)[-1].strip() == "torch" for line in told.stderr.splitlines())


def main(libraries: list[str], rounds: int = 15) -> None:
    imports = {f"import {name}": ["-c", f"import {name}"] for name in libraries}
    ways = {"python -c pass": ["-c", "pass"], **imports, **{name: words for name, (words, _) in COMMANDS.items()}}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):  # interleaved, so that load on the machine affects all ways equally
        for name, words in ways.items():
            times[name].append(seconds(words))
    for name, words in ways.items():
        wall, cpu = (statistics.median(column) for column in zip(*times[name], strict=True))
        torch = "imports torch!" if imports_torch(words) else "no torch"
        goal = f" (goal {COMMANDS[name][1]} s), {torch}" if name in COMMANDS else ""
        print(f"{name:<24} {wall:.3f} s, CPU {cpu:.3f} s{goal}")


if __name__ == "__main__":
    main(sys.argv[1:])
