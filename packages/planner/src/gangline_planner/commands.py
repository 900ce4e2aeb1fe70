"""`gangline plan`: which verb is meant, and its flags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gangline import UserError
from gangline.cluster.file import Cluster, Quantity, load_cluster, shipped
from gangline.config.suggest import near
from gangline.figure import write_figure

USAGE = """\
usage: gangline plan [--tokens N] [--budget DOLLARS] [--price DOLLARS] [--mtbf HOURS] [--json]
                     [--svg FILE] [WORDS OF train ...] [cluster=NAME|FILE]
       gangline plan search [--json] [--svg FILE] [WORDS OF train ...] [cluster=NAME|FILE]
       gangline plan compare RUN_DIR cluster=NAME|FILE [--json]
       gangline plan table [--json] cluster=NAME|FILE
       gangline plan judge FILE [--json]
       gangline plan calibrate --out FILE.yaml [--processes N] [--rounds N]

  WORDS   what this run takes, holds and costs on a cluster; nothing is started, and no GPU is needed.
          Precision, sequence length, batch and layout are assumed, each where it is not named, and printed.
          --tokens: days, money and energy for so many; --budget: how many tokens that buys; --price: of an accelerator
          and hour, where the cluster file names none or you pay another; --mtbf: mean hours between failures that stop
          the run, where it is not what the cluster file says of so many accelerators; --svg: pictures as a file, too
  search  layouts that the words leave open, the fastest first, each as a line for `train`; those that do not fit with
          the memory that they lack; exit code 2 where none fits
  compare  the plan of a run beside what it measured, term by term, and where they part most
  table   sizes of models, 8B to 1T, by sizes of clusters, 8 to 32,768: days, money and energy, as Markdown
  judge   published measurements, rows in JSON, beside what is predicted for them; and how far off it is

  calibrate  this machine, measured with N processes at once (1), as a cluster file for `cluster=FILE.yaml`;
          each number is the middle one of so many rounds (3)

  gangline plan parallel=3d model=llama3-405b launch.processes=16384 cluster=h100_ib --tokens 15e12"""


MOST = 1e24  # of anything that is typed as a number
EXAMPLES = {"tokens": "15e12", "budget": "50000", "price": "2.10", "mtbf": "5", "processes": "8", "rounds": "3"}


def main(argv: Sequence[str]) -> int:
    """The verb `gangline plan`. Raises UserError for words that it does not know."""
    if not argv or {"-h", "--help", "help"} & set(argv):
        print(USAGE)
        return 0
    if argv[0] == "judge":
        return _judge(argv[1:])
    if argv[0] == "calibrate":
        return _calibrate(argv[1:])
    if argv[0] == "search":
        return _search(argv[1:])
    if argv[0] == "table":
        return _table(argv[1:])
    if argv[0] == "compare":
        return _compare(argv[1:])
    return _plan(argv)


def _search(argv: Sequence[str]) -> int:
    from gangline_planner.assumed import planned
    from gangline_planner.search import figure, nothing_fits, search, text

    flags, words = flags_of(argv, ("svg",), ("json",))
    cluster, words = cluster_of(words)
    case = planned(words)
    found = search(case, cluster)
    if "svg" in flags and found.fit:
        write_figure(figure(found, cluster), flags["svg"])
    if "json" in flags:
        rows = [one.data() for one in (*found.fit, *found.large)]
        front = [one.data() for one in found.pareto]
        print(
            json.dumps(
                {"assumed": list(case.assumed), "layouts": rows, "front": front, "others": found.others}, indent=1
            )
        )
    else:
        print(text(found, words, case))
    if not found.fit:
        raise nothing_fits(found, words, case)
    return 0


def _plan(argv: Sequence[str]) -> int:
    from gangline_planner.assumed import planned
    from gangline_planner.choose import chosen
    from gangline_planner.failures import as_text, simulated
    from gangline_planner.judge.calibrated import elsewhere
    from gangline_planner.page import buys, text

    flags, words = flags_of(argv, ("tokens", "budget", "price", "mtbf", "svg"), ("json",))
    given = {name: positive(name, value) for name, value in flags.items() if name not in ("json", "svg")}
    cluster, words = cluster_of(words)
    case = planned(words)
    if "price" in given:
        cluster = cluster.with_numbers({"price.hour": Quantity(given["price"], "--price")})
    if "mtbf" in given:
        for name in ("storage.bandwidth", "restart.seconds"):
            cluster[name]  # which says what lacks
        hours = Quantity(given["mtbf"] * case.world, f"--mtbf {given['mtbf']:g} of the whole run")
        cluster = cluster.with_numbers({"failure.hours": hours})
    plan, assumed = chosen(case, cluster, given.get("tokens"))
    bought = plan.within(given["budget"]) if "budget" in given else None
    if bought is not None and "tokens" not in given:
        plan = bought
    if "svg" in flags:
        from gangline_planner.pictures.plan import plan_figure

        write_figure(plan_figure(plan), flags["svg"])
    course = simulated(plan)
    if "json" in flags:
        budget = {"budget_dollars": given["budget"], "budget_tokens": bought.tokens} if bought else {}
        error = dict(elsewhere()) if cluster.name in shipped() else None
        added = {"simulated": course.data() if course else None, "assumed": list(assumed), "expected_error": error}
        print(json.dumps({**plan.data(), **budget, **added}, indent=1))
    else:
        print(text(plan, case.run, assumed))
        if course is not None:
            print(as_text(course))
        if bought is not None and bought.fits:
            print(buys(bought, given["budget"]))
    return 0


def _judge(argv: Sequence[str]) -> int:
    from gangline_planner.judge.report import as_data, as_text, judge_file

    flags, words = flags_of(argv, (), ("json",))
    if len(words) != 1:
        raise UserError("judge takes one file.", "It holds rows of published measurements, as JSON.")
    judged = judge_file(words[0])
    print(json.dumps(as_data(judged), indent=1) if "json" in flags else as_text(judged))
    return 0


def _calibrate(argv: Sequence[str]) -> int:
    from gangline_planner.calibrate.command import calibrate

    flags, words = flags_of(argv, ("out", "processes", "rounds"), ())
    if words or not flags.get("out", "").endswith(".yaml"):
        raise UserError("calibrate writes one file.", "--out=FILE.yaml says which.")
    print(calibrate(Path(flags["out"]), whole("processes", flags, 1), whole("rounds", flags, 3)))
    return 0


def _table(argv: Sequence[str]) -> int:
    from gangline_planner.table import rows, text

    flags, words = flags_of(argv, (), ("json",))
    cluster, words = cluster_of(words)
    if words:
        raise UserError(
            f"table takes a cluster and nothing else, not {words[0]}.", "gangline plan table cluster=NAME|FILE"
        )
    found = rows(cluster)
    print(json.dumps([row.data() for row in found], indent=1) if "json" in flags else text(found, cluster))
    return 0


def _compare(argv: Sequence[str]) -> int:
    from gangline_planner.compare import compare, text

    flags, words = flags_of(argv, (), ("json",))
    cluster, words = cluster_of(words)
    if len(words) != 1:
        raise UserError(
            "compare takes one run directory.",
            "It reads what that run measured.",
            "gangline plan compare RUN_DIR cluster=NAME|FILE",
        )
    found = compare(words[0], cluster)
    print(json.dumps(found.data(), indent=1) if "json" in flags else text(found))
    return 0


def cluster_of(words: Sequence[str]) -> tuple[Cluster, list[str]]:
    """(the cluster that `cluster=` names, the other words). Raises UserError where none does."""
    names = [word.removeprefix("cluster=") for word in words if word.startswith("cluster=")]
    if len(names) != 1:
        raise UserError(
            "a plan is for a cluster, and the words name none." if not names else "the words name two clusters.",
            "How long a step takes depends on the machine.",
            f"cluster=NAME, one of {', '.join(shipped())}; or cluster=FILE.yaml",
        )
    return load_cluster(names[0]), [word for word in words if not word.startswith("cluster=")]


def flags_of(argv: Sequence[str], valued: Sequence[str], plain: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Flags, with a value or without, and the other words. Raises UserError."""
    flags, words, rest = {}, [], list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            words.append(word)
            continue
        name, sign, value = word.removeprefix("--").partition("=")
        if name in plain and not sign:
            flags[name] = ""
        elif name not in valued:
            known = [*valued, *plain]
            listed = ", ".join(f"--{flag}" for flag in known)
            raise UserError(f"there is no flag {word}.", near(name, known), f"Flags: {listed}.")
        elif not sign and not rest:
            raise UserError(f"{word} needs a value.")
        else:
            flags[name] = value if sign else rest.pop(0)
    return flags, words


def positive(name: str, value: str) -> float:
    """A number above 0, and so small that what is made of it is one, too. Raises UserError."""
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise UserError(f"--{name} {value}: expected a number above 0.", f"Such as  --{name} {EXAMPLES[name]}")
    if not 1 / MOST <= found <= MOST:
        raise UserError(f"--{name} {value}: expected a number between {1 / MOST:g} and {MOST:g}.")
    return found


def whole(name: str, flags: Mapping[str, str], usual: int) -> int:
    """A whole number above 0. Raises UserError."""
    found = positive(name, flags.get(name, str(usual)))
    if found != int(found):
        raise UserError(f"--{name} {flags[name]}: expected a whole number.")
    return int(found)
