"""Seconds of the commands that must answer at once, and whether they import torch. Goals: 0.5 s, 0.5 s, 1 s."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "gangline plugins": (["-m", "gangline.cli.main", "plugins"], 0.5),
    "train --help": (["-m", "gangline.cli.train", "--help"], 0.5),
    "train --cfg job": (["-m", "gangline.cli.train", "--cfg", "job"], 1.0),
}


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def imports_torch(arguments: list[str]) -> bool:
    told = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    return any(line.rsplit("|", 1)[-1].strip() == "torch" for line in told.stderr.splitlines())


def main(rounds: int = 9) -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    bare: list[float] = []
    for _ in range(rounds):  # interleaved, so that a busy moment hits all alike
        bare.append(seconds(["-c", "pass"]))
        for name, (arguments, _) in COMMANDS.items():
            times[name].append(seconds(arguments))
    print(f"{'python -c pass':<18} {statistics.median(bare):.3f} s")
    for name, (arguments, goal) in COMMANDS.items():
        torch = "imports torch!" if imports_torch(arguments) else "no torch"
        print(f"{name:<18} {statistics.median(times[name]):.3f} s (goal {goal} s), {torch}")


if __name__ == "__main__":
    main()
