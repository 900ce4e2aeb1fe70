"""Check that load balancing works, and that a sparse model beats a dense one of equal cost, in short runs on text.

    python benchmarks/moe_balance.py --steps 200

Prints for each run the final held-out loss, and for each layer the load of its busiest expert relative to the mean
load, over all tokens of the last ten steps. "none" has no balancing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

OFF = ("moe.router.global_aux_loss=0", "moe.router.bias_rate=0", "moe.router.seq_aux_loss=0")
SOFTMAX, SIGMOID = (("moe=on", f"moe/router={router}") for router in ("softmax", "sigmoid"))
RUNS = {
    "dense, same cost": ("moe=off",),
    "sigmoid, bias": (*SIGMOID,),
    "softmax, bias": (*SOFTMAX, *OFF, "moe.router.bias_rate=0.01"),
    "softmax, sequence": (*SOFTMAX, *OFF, "moe.router.seq_aux_loss=0.03"),
    "softmax, step": (*SOFTMAX, *OFF, "moe.router.global_aux_loss=0.02"),
    "softmax, none": (*SOFTMAX, *OFF),
    "sigmoid, none": (*SIGMOID, *OFF),
}


def trained(directory: Path, words: tuple[str, ...]) -> list[dict]:
    """Return the metrics records of one run."""
    command = [sys.executable, "-m", "gangline.cli.train", *words, f"run.dir={directory}", "launch.processes=1"]
    command += ["run.sample=0", "checkpoint=off", "track=[jsonl]", "validate.samples=128"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def imbalance(records: list[dict]) -> list[float]:
    """Return, for each layer, the load of the busiest expert relative to the mean, over all of `records`."""
    found = []
    for name in sorted(key for key in records[-1]["metrics"] if key.endswith("/load")):
        totals = [sum(column) for column in zip(*(record["metrics"][name] for record in records), strict=True)]
        found.append(max(totals) * len(totals) / sum(totals))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("words", nargs="*", help="overrides for all runs, after --")
    chosen = parser.parse_args()
    common = (f"run.steps={chosen.steps}", f"validate.every={chosen.steps}", *chosen.words)
    print(f"{'':18} {'held-out':>8}  busiest expert / mean, by layer")
    for name in chosen.runs:
        with tempfile.TemporaryDirectory() as place:
            records = trained(Path(place) / "run", (*RUNS[name], *common))
        loads = "  ".join(f"{value:.2f}" for value in imbalance(records[-10:]))
        print(f"{name:18} {records[-1]['validation_loss']:8.4f}  {loads}", flush=True)


if __name__ == "__main__":
    main()
