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
    "search": "layouts that the overrides leave open, the fastest first, each as a line for `train`",
    "compare": "the plan of a run next to its measurements, term by term",
    "table": "sizes of models, 8B to 1T, by sizes of clusters, 8 to 32,768: days, money and energy",
    "calibrate": "this machine, measured, as a cluster file",
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
    flags.add_argument("--json", action="store_true", help="the report as JSON")
    return flags


def _search(argv: Sequence[str]) -> int:
    from gangline_planner.assumed import complete_words
    from gangline_planner.search import draw_layouts, explain_misfit, format_search, search

    flags = _make_flags(
        "search",
        "Rank the layouts that the overrides leave open, the fastest first, each as a line for `train`; those that do\n"
        "not fit with the memory that they lack. Exit code 2 where none fits.",
        f"OVERRIDE: {OVERRIDES}",
    )
    flags.add_argument("--svg", metavar="FILE", help="a picture of the layouts by time and memory")
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
        "Plan a run on a cluster: what it takes, holds and costs. Nothing is started, and no GPU is needed.\n"
        "Precision, sequence length, batch and layout are assumed, each where it is not named, and printed.",
        f"OVERRIDE: {OVERRIDES}",
        f"verbs, each with a --help of its own: gangline plan VERB ...\n{verbs}\n\n{EXAMPLE}",
    )
    flags.add_number("--tokens", "15e12", "number of tokens to train on: days, money and energy for so many")
    flags.add_number("--budget", "50000", "dollars to spend: how many tokens that buys")
    flags.add_number("--price", "2.10", "dollars of an accelerator and hour; by default that of the cluster file")
    flags.add_number(
        "--mtbf", "5", "mean hours between failures that stop the run; by default by the cluster file and the ranks"
    )
    flags.add_argument("--svg", metavar="FILE", help="pictures of the step, the memory and the pipeline")
    options = flags.read(argv)
    cluster, words = parse_cluster(options.words)
    case = complete_words(words)
    if options.price:
        cluster = cluster.replace_numbers({"price.hour": Quantity(options.price, "--price")})
    if options.mtbf:
        for name in ("storage.bandwidth", "restart.seconds"):
            cluster[name]  # raises UserError if the cluster file lacks the number
        hours = Quantity(options.mtbf * case.world, f"--mtbf {options.mtbf:g} of the whole run")
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

    flags = Flags("plan calibrate", "Measure this machine, and write a cluster file for `cluster=FILE.yaml`.")
    flags.add_argument("--out", metavar="FILE.yaml", default="", help="the cluster file to write")
    flags.add_number("--processes", "8", "number of processes at once (1)", integer=True, default=1)
    flags.add_number("--rounds", "3", "number of rounds; each number is their median (3)", integer=True, default=3)
    options = flags.read(argv)
    if not options.out.endswith(".yaml"):
        raise UserError("calibrate writes one file.", "--out=FILE.yaml says which.")
    print(calibrate(Path(options.out), options.processes, options.rounds))
    return 0


def _print_table(argv: Sequence[str]) -> int:
    from gangline_planner.table import format_table, iterate_rows

    flags = _make_flags(
        "table",
        "Print sizes of models, 8B to 1T, by sizes of clusters, 8 to 32,768: days, money and energy, as Markdown.",
        "cluster=NAME|FILE: the cluster",
    )
    options = flags.read(argv)
    cluster, words = parse_cluster(options.words)
    if words:
        raise UserError(
            f"table takes a cluster and nothing else, not {words[0]}.", "gangline plan table cluster=NAME|FILE"
        )
    rows = iterate_rows(cluster)
    print(json.dumps([row.to_dict() for row in rows], indent=1) if options.json else format_table(rows, cluster))
    return 0


def _compare(argv: Sequence[str]) -> int:
    from gangline_planner.compare import compare, format_comparison

    flags = _make_flags(
        "compare",
        "Print the plan of a run next to its measurements, term by term, and the term in which they part most.",
        "RUN_DIR: the directory of the run, and cluster=NAME|FILE",
    )
    options = flags.read(argv)
    cluster, words = parse_cluster(options.words)
    if len(words) != 1:
        raise UserError(
            "compare takes one run directory.",
            "It reads what that run measured.",
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
            "a plan is for a cluster, and the words name none." if not names else "the words name two clusters.",
            "How long a step takes depends on the machine.",
            f"cluster=NAME, one of {', '.join(list_shipped())}; or cluster=FILE.yaml",
        )
    return load_cluster(names[0]), [word for word in words if not word.startswith("cluster=")]
