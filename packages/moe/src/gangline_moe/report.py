"""Command `gangline moe report RUN_DIR`: layers × experts over time, as text and as a figure. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gangline.cli import make_notes
from gangline.cli.verbs import run_verb
from gangline_basics.figure import write_figure
from gangline_basics.flags import Flags
from gangline_moe.load_history import StepLoads, compute_shares, list_layers, load_history, split_steps
from gangline_moe.picture import draw_over_time

VERBS = {"report": "load of the experts of each layer over a run, as text or SVG"}
SHADES = " .:-+*#%@"  # characters for load / mean load, from 0 to SHADED and more
SHADED = 2.0


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `gangline moe`; return its exit code."""
    return run_verb("moe", VERBS, {"report": report}, argv)


def report(argv: Sequence[str]) -> int:
    """Print the load of a run's experts. Raises UserError without experts, or if the figure cannot be written."""
    flags = Flags("moe report", "Show the load of experts: a row for each expert, a column for each range of steps.")
    flags.add_argument("run_dir", metavar="RUN_DIR")
    flags.add_argument("--svg", metavar="FILE", help="also write the report as an SVG figure")
    flags.add_number("--columns", "60", "maximum number of columns (60)", integer=True, default=60)
    options = flags.read(argv)
    steps, run = load_history(options.run_dir, make_notes("gangline moe report")), Path(options.run_dir).resolve().name
    print(format_report(steps, options.columns, run))
    if options.svg:
        write_figure(draw_over_time(steps, options.columns, run), options.svg)
        print(f"\n{options.svg} written")
    return 0


def format_report(steps: list[StepLoads], columns: int, run: str) -> str:
    """Format the loads as text: per layer a row for each expert, with darker characters for a higher load."""
    parts = split_steps(steps, columns)
    lines = [
        f"load of the experts: {run}",
        f"steps {steps[0].step} to {steps[-1].step}; each row is an expert, each column {len(parts[0])} or more steps",
        f"load / mean load:  '{SHADES[0]}' 0  '{SHADES[len(SHADES) // 2]}' 1  '{SHADES[-1]}' {SHADED:g} or more",
    ]
    for layer in list_layers(steps):
        table = [compute_shares(part, layer) for part in parts if any(layer in step.loads for step in part)]
        last = table[-1]
        lines += ["", f"{layer}: last column {describe_load(last)}{_format_numbers(steps[-1], layer)}"]
        for expert in range(len(last)):
            row = "".join(choose_shade(column[expert]) for column in table)
            lines.append(f"  {expert:>4} |{row}| {last[expert]:.2f}")
    return "\n".join(lines)


def describe_load(last: list[float]) -> str:
    """Describe the largest load / mean load, and the experts without tokens."""
    idle = [str(expert) for expert, value in enumerate(last) if value == 0]
    return f"max/mean {max(last):.2f}" + (f", no tokens for expert {', '.join(idle)}" if idle else "")


def _format_numbers(step: StepLoads, layer: str) -> str:
    """Format a layer's router entropy and share of dropped pairs at a step."""
    numbers = {name.removeprefix(f"{layer}/"): value for name, value in step.numbers.items() if name.startswith(layer)}
    words = [f"{name} {numbers[name]:.4g}" for name in ("entropy", "dropped") if name in numbers]
    return "".join(f", {word}" for word in words)


def choose_shade(value: float) -> str:
    return SHADES[min(len(SHADES) - 1, round(value / SHADED * (len(SHADES) - 1)))]
