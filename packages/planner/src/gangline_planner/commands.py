"""Command `gangline plan` with its subcommands and their flags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gangline import UserError
from gangline.cli.verbs import run_verb
from gangline_basics.cluster.file import Cluster, Quantity, list_shipped, load_cluster
from gangline_basics.figure import write_figure
from gangline_basics.flags import Flags

VERBS = {
    "search": "list the layouts that the overrides allow, fastest first, each as a `train` command",
    "compare": "compare the plan of a run with its measurements, term by term",
    "table": "print days, money and energy of models from 8B to 1T on 8 to 32,768 accelerators",
    "calibrate": "measure this machine and write a cluster file",
}
OVERRIDES = "overrides of `train`, and cluster=NAME|FILE"
EXAMPLE = "gangline plan parallel=3d model=llama3-405b launch.processes=16384 cluster=h100_ib --tokens 15e12"


def main(argv: Sequence[str]) -> int:
    """Run `gangline plan`: a subcommand, or the plan of a run. Return the exit code. Raises UserError."""
    if argv and argv[0] in VERBS:
        runs = {"search": _search, "compare": _compare, "table": _print_table, "calibrate": _calibrate}
        return run_verb("plan", VERBS, runs, argv)
    return _plan(argv if argv and argv[0] != "help" else ["--help"])


def _make_flags(verb: str, text: str, argument: str, more: str = "") -> Flags:
    """Return the flags of a subcommand: its positional argument, and --json for its report."""
    flags = Flags(f"plan {verb}".strip(), text, more)
    flags.add_argument("words", nargs="*", metavar=argument.partition(":")[0], help=argument.partition(": ")[2])
    flags.add_argument("--json", action="store_true", help="print the report as JSON")
    return flags


def _search(argv: Sequence[str]) -> int:
    from gangline_planner.assumed import complete_words
    from gangline_planner.search import draw_layouts, explain_misfit, format_search, search

    flags = _make_flags(
        "search",
        "List the layouts that the overrides allow, fastest first, each as a `train` command. For each layout\n"
        "that does not fit, print the missing memory. The exit code is 2 if no layout fits.",
        f"OVERRIDE: {OVERRIDES}",
    )
    flags.add_argument("--svg", metavar="FILE", help="file for a plot of the layouts by step time and memory")
    options = flags.read(argv)
    cluster, words = parse_cluster(options.words)
    case = complete_words(words)
    layouts = search(case, cluster)
    if options.svg and layouts.fit:
        write_figure(draw_layouts(layouts, cluster), options.svg)
    if options.json:
        rows = [one.to_dict() for one in (*layouts.fit, *layouts.large)]
        front = [one.to_dict() for one in layouts.pareto]
        print(
            json.dumps(
                {"assumed": list(case.assumed), "layouts": rows, "front": front, "others": layouts.others}, indent=1
            )
        )
    else:
        print(format_search(layouts, words, case))
    if not layouts.fit:
        raise explain_misfit(layouts, words, case)
    return 0


def _plan(argv: Sequence[str]) -> int:
    from gangline_planner.accuracy import load_accuracy
    from gangline_planner.assumed import complete_words
    from gangline_planner.choose import choose_plan
    from gangline_planner.failures import format_goodput, simulate_goodput
    from gangline_planner.page import format_budget, format_plan

    verbs = "\n".join(f"  {verb:9} {text}" for verb, text in VERBS.items())
    flags = _make_flags(
        "",
        "Predict memory, step time, cost and failures of a run on a cluster. No GPU is needed, and no run is started.\n"
        "Precision, sequence length, batch and layout are assumed if unset, and the report prints the assumed values.",
        f"OVERRIDE: {OVERRIDES}",
        f"other plan commands (for their options: gangline plan VERB --help):\n{verbs}\n\n{EXAMPLE}",
    )
    flags.add_number("--tokens", "15e12", "number of training tokens: adds days, money and energy")
    flags.add_number("--budget", "50000", "dollars to spend: adds the number of tokens that they buy")
    flags.add_number("--price", "2.10", "dollars per accelerator and hour; default: price.hour of the cluster file")
    flags.add_number(
        "--mtbf", "5", "mean hours between failures that stop the run; default: cluster file and number of ranks"
    )
    flags.add_argument("--svg", metavar="FILE", help="file for plots of the step, the memory and the pipeline")
    options = flags.read(argv)
    cluster, words = parse_cluster(options.words)
    case = complete_words(words)
    if options.price:
        cluster = cluster.replace_numbers({"price.hour": Quantity(options.price, "--price")})
    if options.mtbf:
        for name in ("storage.bandwidth", "restart.seconds"):
            cluster[name]  # raises UserError if the cluster file lacks the number
        hours = Quantity(options.mtbf * case.world, f"--mtbf {options.mtbf:g} of the complete run")
        cluster = cluster.replace_numbers({"failure.hours": hours})
    plan, assumed = choose_plan(case, cluster, options.tokens)
    budget_plan = plan.plan_budget(options.budget) if options.budget else None
    if budget_plan is not None and not options.tokens:
        plan = budget_plan
    if options.svg:
        from gangline_planner.pictures.plan import draw_plan

        write_figure(draw_plan(plan), options.svg)
    course = simulate_goodput(plan)
    if options.json:
        budget = {"budget_dollars": options.budget, "budget_tokens": budget_plan.tokens} if budget_plan else {}
        error = dict(load_accuracy()) if cluster.name in list_shipped() else None
        extras = {"simulated": course.to_dict() if course else None, "assumed": list(assumed), "expected_error": error}
        print(json.dumps({**plan.to_dict(), **budget, **extras}, indent=1))
    else:
        print(format_plan(plan, case.run, assumed))
        if course is not None:
            print(format_goodput(course))
        if budget_plan is not None and budget_plan.fits:
            print(format_budget(budget_plan, options.budget))
    return 0


def _calibrate(argv: Sequence[str]) -> int:
    from gangline_planner.calibrate.command import calibrate

    flags = Flags("plan calibrate", "Measure this machine and write a cluster file for `cluster=FILE.yaml`.")
    flags.add_argument("--out", metavar="FILE.yaml", default="", help="cluster file to write")
    flags.add_number("--processes", "8", "number of concurrent processes (default: 1)", integer=True, default=1)
    flags.add_number(
        "--rounds", "3", "number of rounds; the file has the medians over rounds (default: 3)", integer=True, default=3
    )
    options = flags.read(argv)
    if not options.out.endswith(".yaml"):
        raise UserError("calibrate needs the name of a .yaml file to write.", "--out=FILE.yaml")
    print(calibrate(Path(options.out), options.processes, options.rounds))
    return 0


def _print_table(argv: Sequence[str]) -> int:
    from gangline_planner.table import format_table, iterate_rows

    flags = _make_flags(
        "table",
        "Print days, money and energy of models from 8B to 1T on 8 to 32,768 accelerators, as Markdown.",
        "cluster=NAME|FILE: name or file of the cluster",
    )
    options = flags.read(argv)
    cluster, words = parse_cluster(options.words)
    if words:
        what = f"table accepts only cluster=NAME|FILE, got {words[0]}."
        raise UserError(what, "gangline plan table cluster=NAME|FILE")
    rows = iterate_rows(cluster)
    print(json.dumps([row.to_dict() for row in rows], indent=1) if options.json else format_table(rows, cluster))
    return 0


def _compare(argv: Sequence[str]) -> int:
    from gangline_planner.compare import compare, format_comparison

    flags = _make_flags(
        "compare",
        "Compare the plan of a run with its measurements, term by term, and report the largest difference.",
        "RUN_DIR: run directory, and cluster=NAME|FILE",
    )
    options = flags.read(argv)
    cluster, words = parse_cluster(options.words)
    if len(words) != 1:
        raise UserError(
            "compare takes one run directory.",
            "The command reads the measurements of that run.",
            "gangline plan compare RUN_DIR cluster=NAME|FILE",
        )
    comparison = compare(words[0], cluster)
    print(json.dumps(comparison.to_dict(), indent=1) if options.json else format_comparison(comparison))
    return 0


def parse_cluster(words: Sequence[str]) -> tuple[Cluster, list[str]]:
    """Return (cluster of the override `cluster=`, other overrides). Raises UserError unless there is one `cluster=`."""
    names = [word.removeprefix("cluster=") for word in words if word.startswith("cluster=")]
    if len(names) != 1:
        raise UserError(
            "no cluster is given for the plan." if not names else "several clusters are given, but a plan is for one.",
            "The step time depends on the cluster.",
            f"cluster=NAME, one of {', '.join(list_shipped())}; or cluster=FILE.yaml",
        )
    return load_cluster(names[0]), [word for word in words if not word.startswith("cluster=")]
