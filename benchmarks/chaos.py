"""Inject every kind of fault into a real run, and print detection, attribution, delay, and the loss curve.

    python benchmarks/chaos.py [--rounds 3] [--only numbers]

Four ranks of a tiny model run over gloo. A fault counts as attributed if its verdict names the rank or the step with
the fault. `curve` compares the losses of the run with the losses of a run without faults. By default gangline skips
some data for good (a step with non-finite gradients, a bad batch); here that data is read again, so the losses must be
equal. "bits" means bitwise equal. If ranks are lost for good, the new layout sums in another order.

The table has medians and maxima of seconds: `verdict` from the fault to its verdict, `step` from the fault to the first
step after the verdict that completes at or past the step of the fault. `named` counts the attributed faults.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gangline.run.events import read_events
from gangline_testkit.real_runs import RealRuns

Line = dict[str, Any]
STEPS = 120
LAYOUT = ("parallel=ddp", "launch.processes=4", f"run.steps={STEPS}", "checkpoint.every=10", "run.seed=3")
AGAIN = tuple(
    f"health.monitors.playbooks.{kind}.{word}"
    for kind in ("not_finite", "loss_spike", "gradient_spike")
    for word in ("actions=[roll_back]", "patience=1", "skip=false", "back=0")
)
ELASTIC = ("launch=elastic", "launch.nodes=1:2", "launch.agents=1")
WORDS = {
    "numbers": (
        "health.chaos.at=[nan@40:1,bad-batch@60:2,bit-flip@83:3]",
        "health.monitors.corruption.every=5",
        *AGAIN,
    ),
    "processes": ("health.chaos.at=[kill@15:1,stop@35:2,hang@55:0,exception@75:3]",),
    "machine": ("health.chaos.at=[disk-full@15:0,lost-store@60:1]", "checkpoint=zarr", "health.chaos.store_seconds=8"),
    "slow": ("health.chaos.at=[slow@20:3]", "health.chaos.slow_seconds=0.3", "health.chaos.slow_steps=30"),
    "agents": ("health.chaos.at=[kill-agent@20:1,kill-all@60:2]", *ELASTIC),
    "drawn": ("health.chaos.faults=4", "health.chaos.seconds=20", "health.chaos.seed={seed}"),
}


@dataclass(frozen=True)
class Found:
    """One fault and its first verdict.

    seconds  from the fault to the verdict
    again    from the fault to the first step after the verdict that completes at or past the step of the fault
    """

    kind: str
    said: str = ""
    named: bool = False
    seconds: float = math.nan
    again: float = math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="text in the names of the runs to start; default: all")
    options = parser.parse_args()
    every: dict[str, list[Found]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory, RealRuns(Path(directory)) as runs:
        runs.train("run.dir=calm", *LAYOUT)
        for number in range(options.rounds):
            for name, words in WORDS.items():
                if options.only not in name or ("checkpoint=zarr" in words and not find_spec("gangline_ckpt_zarr")):
                    continue
                run_dir = f"{name}-{number}"
                given = [word.format(seed=number) for word in words]
                starts = supervised(runs, run_dir, given, agents=2 if "launch=elastic" in words else 1)
                found = list(judged(runs.directory / run_dir))
                curve = same(runs.read_curve(run_dir), runs.read_curve("calm"))
                print(f"{run_dir}: curve {curve}, {starts} starts of the command", flush=True)
                for one in found:
                    every[one.kind].append(one)
                    print(
                        f"  {one.kind:<11} verdict {one.seconds:6.2f} s  step {one.again:6.2f} s  {one.said[:150]}",
                        flush=True,
                    )
    print(f"\n{'kind':<11} {'faults':>6} {'found':>6} {'named':>6}  verdict   max s     step   max s")
    for kind, all_ in every.items():
        told = [one for one in all_ if one.said]
        line = f"{kind:<11} {len(all_):>6} {len(told):>6} {sum(one.named for one in all_):>6}"
        print(line, *spread(one.seconds for one in told), *spread(one.again for one in told))


def spread(seconds: Iterable[float]) -> tuple[str, str]:
    found = list(seconds) or [math.nan]
    return f"{statistics.median(found):8.2f}", f"{max(found):7.2f}"


def supervised(runs: RealRuns, run_dir: str, words: list[str], agents: int) -> int:
    """Run the same command again until it ends by itself; return the number of starts."""
    words = [f"run.dir={run_dir}", *LAYOUT, "health=[monitors,chaos]", *words]
    if agents == 1:
        runs.train(*words, "launch.max_restarts=20")
        return 1
    for number in range(1, 10):
        living = [runs.start(*words, GANGLINE_NODE="127.0.0.1") for _ in range(agents)]
        if 0 in [ended(process) for process in living]:
            return number
        time.sleep(1.0)
    raise AssertionError("the run did not end after 9 starts of its command")


def ended(process: subprocess.Popen[str]) -> int:
    printed, _ = process.communicate(timeout=300)
    if process.returncode > 0:
        print(printed[-2000:])
    return process.returncode


def same(curve: list[tuple[int, float, float]], calm: list[tuple[int, float, float]]) -> str:
    """Return the difference between two loss curves, as text."""
    if curve == calm:
        return "bits"
    if [step for step, *_ in curve] != [step for step, *_ in calm]:
        return f"WRONG: {len(curve)} steps, expected {len(calm)}"
    far = max(abs(a - b) / max(abs(b), 1e-3) for (_, a, _), (_, b, _) in zip(curve, calm, strict=True))
    return f"equal within {far:.1e}" if far < 1e-3 else f"WRONG: relative difference {far:.1e}"


# --- verdicts -------------------------------------------------------------------------------------------------------


def moment(line: Line) -> float:
    time = line["time"]
    return float(time) if isinstance(time, int | float) else datetime.fromisoformat(time).timestamp()


SAYS: dict[str, Callable[[Line, Line], bool]] = {
    "nan": lambda fault, line: line["kind"] == "not-finite" and line["where"] == f"step {fault['step']}",
    "bad-batch": lambda fault, line: line["kind"].endswith("-spike") and line["where"] == f"step {fault['step']}",
    "bit-flip": lambda fault, line: line["kind"] == "corruption" and line["where"] == f"rank {fault['rank']}",
    "disk-full": lambda fault, line: line["kind"] == "not-saved" and "too large" in line["evidence"],
    "lost-store": lambda fault, line: line["kind"] == "not-saved" and "store" in line["evidence"],
    "slow": lambda fault, line: line["kind"] == "straggler" and line["where"] == f"rank {fault['rank']}",
    "stop": lambda fault, line: line["kind"] == "hang" and line["details"]["ranks"] == [fault["rank"]],
    "hang": lambda fault, line: line["kind"] == "hang" and line["details"]["ranks"] == [fault["rank"]],
    "kill": lambda fault, line: f"rank {fault['rank']}" in str(line.get("evidence")),
    "exception": lambda fault, line: f"rank {fault['rank']}" in str(line.get("evidence")),
    "kill-agent": lambda fault, line: line.get("why") in ("node", "rank"),
    "kill-all": lambda fault, line: line.get("why") == "start",
}
BY_LAUNCHER = ("kill", "exception", "kill-agent", "kill-all")
ROUTINE = ("monitors", "not-compared", "probe-unknown", "chosen")


def judged(run_dir: Path) -> Iterable[Found]:
    """Yield for each fault its first correct verdict, else the first verdict before the next fault."""
    events = read_events(run_dir)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    verdicts = [line for line in events if line["event"] == "verdict" and line["kind"] not in ROUTINE]
    faults = [line for line in events if line["event"] == "fault"]
    ends = [*(moment(fault) for fault in faults[1:]), math.inf]
    for fault, end in zip(faults, ends, strict=True):
        began, launcher = moment(fault), fault["kind"] in BY_LAUNCHER
        after = [line for line in events if began <= moment(line) < end and line is not fault]
        told = [line for line in after if line["event"] == ("launch" if launcher else "verdict")]
        told = [line for line in told if launcher or line["kind"] not in ROUTINE]
        later = told if launcher else [line for line in verdicts if moment(line) >= began]
        # a slow rank is detected only after some steps
        right = [line for line in later if SAYS[fault["kind"]](fault, line)]
        if not told and not right:
            yield Found(fault["kind"])
            continue
        line = (right or told)[0]
        done = (record["time"] for record in records if record["step"] >= fault["step"] and not record["skipped"])
        again = min((at for at in done if at > moment(line)), default=math.nan)
        said = f"{line.get('kind') or line.get('why')} {line.get('where', '')}: {line['evidence']}"
        yield Found(fault["kind"], said, bool(right), moment(line) - began, again - began)


if __name__ == "__main__":
    main()
