"""Check a machine with a GPU in one command: compare its results with a CPU, and its throughput with the peak.

    python benchmarks/gpu.py                   all groups, one after another
    python benchmarks/gpu.py checks            some groups: checks, rates, compiled
    python benchmarks/gpu.py --tiny            the same with small sizes, in seconds; with --device cpu on any machine
    python benchmarks/gpu.py --only ring fp8   some lines of the table
    python benchmarks/gpu.py --seconds 120     start no line after 120 s; the lines left are listed
    python benchmarks/gpu.py --out FOLDER      write the table as data, and profiles, while the benchmark runs

Needs torch, numpy, pluggy, PyYAML and pytest, but no network and no installed package of this repository: in a clone it
uses the packages of the source tree. If other dependencies are missing, it first unpacks their wheels from a folder
`.whl` next to `packages/`.

Checks come first, each compared with the CPU or with a plain formula (`gpu_checks.py`). Then come throughput numbers,
each with its baseline (`gpu_rates.py`, `gpu_kernels.py`, `gpu_steps.py`), then those of compiled code. A failed check
does not stop the others; the exit code is 1 if any check failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import tomllib
import traceback
import zipfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_places import Place

ROOT = Path(__file__).resolve().parent.parent
FROM_TREE = "GANGLINE_FROM_TREE"


@dataclass(frozen=True)
class Line:
    """A line of the table. verdict: "ok", "WRONG", "left out", or "" for a throughput."""

    name: str
    verdict: str
    found: str
    seconds: float


def as_in_the_tree() -> None:
    """Run this script again with the packages of the source tree on the module path, unless they are installed."""
    if importlib.util.find_spec("gangline_moe") is not None or FROM_TREE in os.environ:
        return
    site = Path(tempfile.mkdtemp(prefix="gangline-site-"))
    for wheel in sorted((ROOT / ".whl").glob("*.whl")):
        with zipfile.ZipFile(wheel) as content:
            content.extractall(site)
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project.get("entry-points", {})
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    folders = os.pathsep.join([*sources, str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": folders, FROM_TREE: "1"}
    # orig_argv keeps the interpreter's flags
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def run(name: str, work: Callable[[], str], of_check: bool) -> Line:
    """Return one line: the result of `work`, or its error."""
    from gpu_places import LeftOut

    began = time.perf_counter()
    try:
        verdict, found = ("ok" if of_check else ""), work()
    except LeftOut as why:
        verdict, found = "left out", str(why)
    except Exception as error:  # the other lines are still useful
        verdict, found = "WRONG", f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        if not isinstance(error, AssertionError):
            traceback.print_exc()
    return Line(name, verdict, found, time.perf_counter() - began)


def show(lines: Iterable[Line]) -> None:
    """Print each line as soon as it is measured, so that results stay on the screen if the machine is lost."""
    for line in lines:
        print(f"{line.verdict:<9}{line.name:<26}{line.seconds:6.1f} s  {line.found}", flush=True)


def is_called(name: str, part: str, names: Collection[str]) -> bool:
    """Return whether `part` selects a line: equal to the line's name, or a part of it if no line has that name."""
    return part == name or (part not in names and part in name)


def groups() -> dict[str, dict[str, Callable[[Place], str]]]:
    """Return the lines of the table, by group and name."""
    import gpu_checks
    import gpu_kernels
    import gpu_rates
    import gpu_steps

    return {
        "checks": gpu_checks.CHECKS,
        "rates": gpu_rates.RATES | gpu_kernels.RATES | gpu_steps.RATES,
        "compiled": gpu_rates.COMPILED | gpu_kernels.COMPILED | gpu_steps.COMPILED,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="checks, rates or compiled; default: all groups")
    parser.add_argument("--device", help="torch device; default: cuda if available, else cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes: test the code, without meaningful throughput")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of lines, or parts of their names")
    parser.add_argument("--seconds", type=float, help="time in seconds after which no line starts")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for GROUP.json and for profiles")
    given = parser.parse_args(argv)

    from gpu_places import Place

    from gangline_testkit.pool import close_all

    began, place = time.perf_counter(), Place.of(given.device, given.tiny, given.out)
    known = groups()
    if unknown := [group for group in given.groups if group not in known]:
        parser.error(f"unknown group {', '.join(unknown)}; the groups are {', '.join(known)}")
    asked = [(group, name, work) for group in given.groups or known for name, work in known[group].items()]
    names = {name for _, name, _ in asked}
    chosen = [w for w in asked if not given.only or any(is_called(w[1], part, names) for part in given.only)]
    if not chosen:
        parser.error(f"unknown line {', '.join(given.only)}; the lines are {', '.join(w[1] for w in asked)}")
    print(f"{place}\n", flush=True)
    lines: list[Line] = []
    for group, name, work in chosen:
        if given.seconds is not None and time.perf_counter() - began > given.seconds:
            lines.append(Line(name, "left out", "the time limit of --seconds was reached", 0.0))
        else:
            lines.append(run(name, partial(work, place), group == "checks"))
            place.free()
        show(lines[-1:])
        table = {"place": str(place), "lines": [asdict(line) for line in lines]}
        place.write(f"{'-'.join(given.groups) or 'all'}.json", json.dumps(table, indent=1))
    close_all()
    wrong = [line.name for line in lines if line.verdict == "WRONG"]
    checked = sum(line.verdict == "ok" for line in lines)
    print(f"\n{checked} checks passed" + f"; WRONG: {', '.join(wrong)}" * bool(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    as_in_the_tree()
    sys.exit(main())
