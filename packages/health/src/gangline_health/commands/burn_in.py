"""Command `gangline health burn-in [OVERRIDES]`: measures the machines of a job with a one-step run of a tiny model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gangline import UserError
from gangline.storage.files import read_regular
from gangline_basics.flags import Flags
from gangline_basics.launch.config import ElasticLaunch
from gangline_basics.launch.nodes import parse_nodes

if TYPE_CHECKING:
    from gangline.config import Run

# A tiny model: its one step after the measurements shows that a complete step works. On several nodes, the command of
# each node joins the same run, so these options must be equal on all nodes: the data is Python's own source.
MODEL = (
    "model.dim=64", "model.layers=1", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=128",
    "batch.sequence_length=32", "data=text", "data.path=null",
    "run.steps=1", "run.sample=0", "validate.every=null", "checkpoint=off", "track=[]", "parallel=ddp",
)  # fmt: skip
MOST_SAMPLES = 4096  # maximum global batch size of the step


def run(argv: Sequence[str]) -> int:
    """Run burn-in and print its measurements; return the exit code of the run: 0, or 3 if a rank is bad."""
    flags = Flags(
        "health burn-in",
        "Measure matmul, memory and links of every rank. Exit code 3: a rank is far below the median.",
    )
    flags.add_argument("--json", action="store_true", help="print the measurements as JSON, for scripts")
    flags.add_argument("words", nargs="*", metavar="OVERRIDE", help="overrides of train: launch.processes=8")
    options = flags.read(argv)
    words = options.words
    name = next((word.partition("=")[2] for word in words if word.startswith("run.dir=")), "")
    run_dir = Path(name or f"runs/burn-in-{time.strftime('%Y%m%d-%H%M%S')}")
    own = [*MODEL, "health=[burn_in]"]
    own += [f"batch.global_size={choose_global_size(compose_launch([*own, *words]))}", f"run.dir={run_dir}"]
    command = [sys.executable, "-P", "-m", "gangline.cli.train", *own, *words]
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    place = run_dir / "logs" / "burn-in.json"
    if code in (0, 3) and place.exists():
        report = json.loads(read_regular(place))
        if options.json:
            print(json.dumps({**report, "cluster": str(run_dir / "cluster.yaml")}, indent=1))
        else:
            show(report, run_dir, Console())
    elif code == 0:
        print(f"no measurements yet: the job writes {place}", file=sys.stderr)
    return code


def compose_launch(words: Sequence[str]) -> Run:
    """Return the run to launch. Raises UserError for invalid overrides or launch options, for resume and for from."""
    from gangline.config.compose import compose_one

    if earlier := next((word for word in words if word.startswith(("resume=", "from="))), ""):
        raise UserError(f"{earlier} is not supported: burn-in starts a new run.", "Omit resume= and from=.")
    run = compose_one(words)
    if problems := run.launch.check(run):
        raise UserError.of(problems)
    return run


def choose_global_size(run: Run) -> int:
    """Return a global batch size that is divisible by the number of ranks, also with fewer nodes than the maximum."""
    from gangline.config.check import count_ranks

    worlds = [count_ranks(run)]
    if isinstance(run.launch, ElasticLaunch):
        fewest, most = parse_nodes(run.launch.nodes)
        worlds += [run.launch.count_ranks_of_node(run) * nodes for nodes in range(fewest, most)]
    every = math.lcm(*worlds)
    return every if every <= MOST_SAMPLES else worlds[0]


def show(found: dict[str, Any], run_dir: Path, console: Console) -> None:
    """Print the measurements of each rank as a table that marks bad ranks, and the slow links."""
    bad = {one["rank"]: one["why"] for one in found["bad"]}
    table = Table(title=f"{len(found['ranks'])} ranks", title_justify="left")
    columns = ("rank", "node", "TFLOP/s", "memory GB/s", "all-reduce GB/s", "in-node GB/s", "inter-node GB/s", "")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in (1, len(columns) - 1) else "right")
    for row in found["ranks"]:
        rates = [row["memory"], row["all_reduce"], row["to_node"], row["to_others"]]
        table.add_row(
            str(row["rank"]), row["node"], f"{row['matmul'] / 1e12:.3g}",
            *(f"{rate / 1e9:.3g}" if rate else "-" for rate in rates),
            "BAD: " + "; ".join(bad[row["rank"]]) if row["rank"] in bad else "",
            style="red" if row["rank"] in bad else "",
        )  # fmt: skip
    console.print(table)
    for link in found["links"]:
        console.print(f"slow link: {link}")
    console.print(f"{run_dir / 'cluster.yaml'}: these measurements as a cluster file, for cluster=FILE")
