"""Command `gangline health simulate`: simulates what a job loses to failures, and compares it with closed forms."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from gangline import UserError
from gangline.explain.reliability import FailureSimulator, SimulatedJob, build_simulator
from gangline_health.ledger.picture import format_kind
from gangline_health.simulate import EventSimulator

OPTIONS = {
    "faults_per_node_day": (float, "faults per node and day"),
    "save_seconds": (float, "seconds that a save blocks training"),
    "checkpoint_seconds": (float, "seconds of training between two saves; default: the Young/Daly optimum"),
    "detection_seconds": (float, "seconds from a fault to its detection"),
    "restart_seconds": (float, "seconds from the detection of a fault to the next step"),
    "spares": (int, "number of spare nodes"),
    "repair_seconds": (float, "seconds until a failed node is repaired and a spare"),
    "seed": (int, "seed of the first simulation"),
}

LARGEST = 1e12  # maximum value of any numeric option
MOST_FAULTS = 1e7  # maximum number of simulated faults: they take a minute or two


def run(argv: Sequence[str]) -> int:
    """Simulate a job and print the result. Raises UserError for an impossible job, or for too many faults."""
    parser = argparse.ArgumentParser(
        prog="gangline health simulate", description="Simulate a job of N nodes over D days, with failures and repairs."
    )
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--days", type=float, required=True)
    for name, (kind, text) in OPTIONS.items():
        default = SimulatedJob.__dataclass_fields__[name].default
        stands = "" if default is None else f" (default {default:g})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text + stands)
    parser.add_argument("--courses", type=int, default=10, help="number of simulations, each with its own seed")
    parser.add_argument("--simulator", default="events", help="name of a part of the group simulator (default events)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for scripts")
    options = vars(parser.parse_args(list(argv)))
    as_json, courses, plays = options.pop("json"), options.pop("courses"), build_simulator(options.pop("simulator"))
    for name, value in {**options, "courses": courses}.items():
        if value is None or name == "seed":
            continue
        may_be_0 = name in ("spares", "detection_seconds", "restart_seconds", "repair_seconds")
        if not (0 <= value <= LARGEST) or (value == 0 and not may_be_0):
            least = "0 or more" if may_be_0 else "more than 0"
            raise UserError(
                f"--{name.replace('_', '-')} {value} is out of range.",
                f"The value must be {least}, and at most {LARGEST:g}.",
            )
    job = SimulatedJob(**options)
    faults = job.nodes * job.faults_per_node_day * job.days * courses
    if faults > MOST_FAULTS:
        raise UserError(
            f"{faults:.3g} faults are too many to simulate.",
            f"The maximum is {MOST_FAULTS:g} faults, over all --courses.",
            "",
            "Reduce --nodes, --days, --courses or --faults-per-node-day.",
        )
    try:
        simulation = simulate_courses(job, courses, plays)
    except (OverflowError, ZeroDivisionError) as error:
        between, recovery = job.reliability.mtbf_seconds, job.detection_seconds + job.restart_seconds
        raise UserError(
            f"this job makes no progress: a fault every {between:.3g} s, and each recovery takes {recovery:g} s.",
            f"A save takes {job.save_seconds:g} s.",
            "",
            "Reduce --nodes, --faults-per-node-day, --restart-seconds, --detection-seconds or --save-seconds.",
        ) from error
    print(json.dumps(simulation, indent=1) if as_json else format_simulation(simulation))
    return 0


def simulate_courses(job: SimulatedJob, courses: int, plays: FailureSimulator | None = None) -> dict[str, Any]:
    """Return means over `courses` simulations of a job, each with its own seed, next to the closed forms."""
    plays = plays or EventSimulator()
    every = [plays.simulate(replace(job, seed=job.seed + n)) for n in range(courses)]
    kinds = {kind: sum(one.seconds[kind] for one in every) / courses for kind in every[0].seconds}
    wall, busy = every[0].wall_seconds, every[0].wall_seconds - kinds.get("idle", 0.0)
    return {
        "version": 1,
        "job": {**asdict(job), "checkpoint_seconds": job.every},
        "wall_seconds": wall,
        "seconds": kinds,
        "faults": sum(one.faults for one in every) / courses,
        "fewest_spares": min(one.fewest_spares for one in every),
        "ettr": sum(one.ettr for one in every) / courses,  # over all time, idle time included
        "ettr_without_idle": kinds["compute"] / busy if busy else 0.0,  # as `gangline health report` defines ETTR
        "closed_form": {
            "ettr": job.reliability.compute_ettr(job.every),
            "mtbf_seconds": job.reliability.mtbf_seconds,
            "young_daly_seconds": job.reliability.compute_young_daly(),
        },
    }


def format_simulation(found: dict[str, Any]) -> str:
    """Return the simulation as lines of text, the kind with the largest share of the time first."""
    job, closed, wall = found["job"], found["closed_form"], found["wall_seconds"]
    lines = [
        f"{job['nodes']} nodes, {job['days']:g} days, a save every {job['checkpoint_seconds']:.4g} s",
        f"{found['faults']:.1f} faults, one every {closed['mtbf_seconds'] / 3600:.3g} h; "
        f"ETTR {found['ettr_without_idle']:.2%} (closed form {closed['ettr']:.2%})",
    ]
    if idle := found["seconds"].get("idle"):
        lines.append(
            f"ETTR {found['ettr']:.2%} over all time: the job waited {idle / 3600:.2f} h for nodes, with "
            f"--spares {job['spares']} and --repair-seconds {job['repair_seconds']:g}"
        )
    for kind, sum_ in sorted(found["seconds"].items(), key=lambda item: -item[1]):
        if sum_:
            lines.append(f"  {format_kind(kind):24} {sum_ / 3600:10.2f} h  {sum_ / wall:7.2%}")
    return "\n".join([*lines, f"  minimum number of free spares: {found['fewest_spares']}"])
