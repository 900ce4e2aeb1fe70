"""Every check of the project: `nox` runs the default ones, `nox -l` lists all, `nox -s nightly` runs the long ones.

The matrix is computed from packages/*: a new package needs no line here. Two sessions run at a time, and each spreads
its tests over the cores: tests of whole runs wait for half of their time, for ranks, limits and disks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from contextlib import suppress
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PACKAGES = {
    path.parent.name: tomllib.loads(path.read_text()) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
# Those with the most tests first: sessions begin in the order of this file, and none of them ends alone.
TESTED = [name for name in PACKAGES if (ROOT / "packages" / name / "tests").is_dir()]
LARGEST = sorted(TESTED, key=lambda name: -sum(1 for _ in ROOT.glob(f"packages/{name}/tests/**/*.py")))
DIST = ROOT / "dist"
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
PYTEST = ("pytest", "-q", "-m", "not nightly", "--durations=10")
# A test that waits for processes or the clock is tried once more (conftest.py) and its first failure is printed; more
# than three such tests are no matter of a loaded machine.
AGAIN = ("--rerun-show-tracebacks", "--max-suite-reruns", "3")
# The tests of a class or a file stay together on one core, for they share what they make. Each core may have pools of
# eight ranks, so many cores do not help. The order is that of conftest.py.
SPREAD = (*AGAIN, "-n", "auto", "--maxprocesses", "8", "--no-loadscope-reorder", "--dist", "loadscope")
FEW_FILES = 16  # a package with fewer test files has one process: each more loads all again, 7 to 45 seconds of a core
SPREADING = ("pytest-xdist", "pytest-rerunfailures")
NONE_THERE = 5  # pytest's exit code where no test of that mark is

# What nox was asked for; where sessions run side by side, each is asked for alone in a process of its own.
ASKED = os.environ.setdefault("GANGLINE_NOX_WORDS", " ".join(sys.argv[1:])).split()

# uv compiles no bytecode, so with this set every process would compile torch anew (4 s instead of 2 for an import).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
nox.options.default_venv_backend = "uv"
nox.options.parallel = 2
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False  # a Python that is not here is left out, and nox says so
nox.options.download_python = "never"


def pip_find_links() -> str:
    """Where pip looks for local wheels (a CPU build of torch, say); uv ignores pip's settings."""
    if "PIP_FIND_LINKS" in os.environ:
        return os.environ["PIP_FIND_LINKS"]
    for scope in ("global", "install", "site", "user"):
        asked = [sys.executable, "-m", "pip", "config", "get", f"{scope}.find-links"]
        found = subprocess.run(asked, capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.strip()
    return ""


def show_pyenv_pythons() -> None:
    """Let pyenv's shims answer for every Python it has, not for the one in use alone."""
    if shutil.which("pyenv") and "PYENV_VERSION" not in os.environ:
        listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True).stdout.split()
        own = ".".join(map(str, sys.version_info[:3]))
        os.environ["PYENV_VERSION"] = ":".join([own, *(v for v in listed if v != own and v.startswith("3."))])


show_pyenv_pythons()
if "UV_FIND_LINKS" not in os.environ and (links := pip_find_links()):
    os.environ["UV_FIND_LINKS"] = ",".join(links.split())


def editable(*names: str) -> list[str]:
    """Install arguments for packages of this tree and what they need of it; basics too: nothing trains without."""
    wanted = list(dict.fromkeys((*names, "basics")))
    for name in wanted:  # it grows
        wanted += [other for other in siblings(PACKAGES[name]["project"]["dependencies"]) if other not in wanted]
    return [word for name in wanted for word in ("-e", f"packages/{name}")]


def siblings(requirements: list[str]) -> list[str]:
    """The packages of this tree among some requirements."""
    names = (re.match(r"gangline-([a-z-]+)", requirement) for requirement in requirements)
    return [found[1] for found in names if found and found[1] in PACKAGES]


def install(session: nox.Session, *arguments: str) -> None:
    """Install in one command, so that siblings find each other.

    Editable packages are named in a file: uv builds those of its command line each time (0.4 s of CPU for each package
    and session), and those of a file once, until their pyproject.toml changes.
    """
    others = list(arguments)
    listed = Path(session.virtualenv.location) / "editable.txt"
    lines = []
    while "-e" in others:
        at = others.index("-e")
        lines.append(f"-e {Path(others[at + 1]).resolve()}\n")
        del others[at : at + 2]
    listed.write_text("".join(lines))
    session.install(*CONSTRAINTS, *others, *(["-r", str(listed)] if lines else []))
    take_over_bytecode(Path(session.virtualenv.location))


def take_over_bytecode(environment: Path) -> None:
    """Link what Python has compiled in the environments beside it: torch alone takes six seconds of a core each time.

    Python compares each file with the size and the time of its source, which uv's cache gives to all environments.
    """
    for site in environment.glob("lib/python*/site-packages"):
        for package in [path for path in site.iterdir() if path.is_dir() and not (path / "__pycache__").exists()]:
            for other in environment.parent.glob(f"*/lib/{site.parent.name}/site-packages/{package.name}"):
                for compiled in other.rglob("__pycache__"):
                    target = package / compiled.relative_to(other)
                    if target.parent.is_dir():
                        with suppress(OSError):  # it is there by now, or being written
                            shutil.copytree(compiled, target, copy_function=os.link)


def one_thread(session: nox.Session) -> None:
    """Several ranks share a few cores in the tests."""
    session.env["OMP_NUM_THREADS"] = "1"


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Style, imports, formatting."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(allow_parallel=True)
def types(session: nox.Session) -> None:
    """Static types of every package, and of the benchmarks: a rename that breaks one is seen."""
    install(session, "mypy", "pytest", "matplotlib", *editable(*PACKAGES))
    scripts = [*sorted(ROOT.glob("benchmarks/*.py")), ROOT / "benchmarks" / "published"]
    session.run("mypy", *map(str, [*sorted(ROOT.glob("packages/*/src/*")), *scripts]))


@nox.session(allow_parallel=True)
def together(session: nox.Session) -> None:
    """All packages installed: what crosses them."""
    install(session, *everything())
    one_thread(session)
    session.run(*PYTEST, *SPREAD, "tests", *session.posargs)


@nox.session(allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Every example in the documentation runs; every hook and option is in it."""
    install(session, *editable(*PACKAGES), "matplotlib", *SPREADING)
    one_thread(session)
    session.run(*PYTEST, *SPREAD[:-1], "worksteal", "docs", *session.posargs)


@nox.session(allow_parallel=True)
def site(session: nox.Session) -> None:
    """Build the documentation as a site in site/: a warning is an error, and no page loads anything from elsewhere."""
    install(session, "mkdocs-material", *editable("core", "testkit"))
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "docs/site_checks.py", "site")


@nox.session(allow_parallel=True)
@nox.parametrize("package", LARGEST, ids=LARGEST)
def tests(session: nox.Session, package: str) -> None:
    """One package's own tests; a plugin's with no other plugin beside it, and first without what tests need."""
    one_thread(session)
    if package != "core" and not session.posargs:
        install(session, "--exact", *editable("core", package))
        session.run("gangline", "plugins")
        session.run("python", "-c", IMPORT_ALL.format(distribution=f"gangline-{package}"))
    install(session, *editable("core", package, "testkit", *siblings(extras(package))), *others(package), *SPREADING)
    tests = ROOT / "packages" / package / "tests"
    spread = SPREAD if len(list(tests.glob("test_*.py"))) >= FEW_FILES else AGAIN
    session.run(*PYTEST, *spread, f"packages/{package}/tests", *session.posargs)


@nox.session(default=False)
def quick(session: nox.Session) -> None:
    """Two minutes: style, and what tests fit into them. `-- moe` names packages; else it is those that have changed."""
    packages = [word for word in session.posargs if word in PACKAGES] or changed()
    install(session, "ruff", *everything())
    one_thread(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    folders = [f"packages/{package}/tests" for package in packages] or ["tests", "docs"]
    more = [word for word in session.posargs if word not in PACKAGES]
    session.log(f"Tests of {', '.join(folders)}, the changed and the short ones first.")
    spread = (*SPREAD[:-2], "--dist", "load", "--maxschedchunk", "1")  # in order
    session.run(*PYTEST, *spread, "--seconds", "90", *folders, *more)


def changed() -> list[str]:
    """The packages with a file that is not committed; where all is, those of the last commit."""
    for command in (["git", "status", "--porcelain"], ["git", "show", "--name-only", "--format="]):
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        if said.strip():
            return [name for name in PACKAGES if f"packages/{name}/" in said]
    return []


# Tests of what the command line needs: they pass without torch.
TORCH_FREE = [
    "attempts",
    "boundaries",
    "check",
    "cli_errors",
    "compose",
    "mesh",
    "plugins",
    "serial",
    "shard",
]


@nox.session(python="3.13", allow_parallel=True)
def light(session: nox.Session) -> None:
    """The torch-free half on the newest Python, in an environment without torch."""
    torch_free(session)


@nox.session(python="3.12", default=False)
def light_between(session: nox.Session) -> None:
    """The same on the Python between the oldest, which runs all else, and the newest: a part of the nightly."""
    torch_free(session)


def torch_free(session: nox.Session) -> None:
    """The tests of what needs no torch, where there is none."""
    install(session, "annotated-types", "numpy", "hydra-core", "pluggy", "rich", "pytest", "hypothesis")
    install(session, "--no-deps", *editable("core", "testkit"))
    files = [f"packages/core/tests/test_{name}.py" for name in TORCH_FREE]
    session.run(*PYTEST, *files, "packages/basics/tests/test_schedule.py", *session.posargs)


@nox.session(python=["3.12", "3.13"], allow_parallel=True)
def readers(session: nox.Session) -> None:
    """The newest zarr shows what a checkpoint holds, in an environment without torch."""
    session.install("annotated-types", "numpy", "hydra-core", "pluggy", "rich", "pytest")
    session.install("zarr", "fsspec", "fastcrc", "crc32c")
    install(session, "--no-deps", *editable("core", "ckpt-zarr"))
    session.run(*PYTEST, "packages/ckpt-zarr/tests/test_readers.py", *session.posargs)


def extras(package: str) -> list[str]:
    """What a package's tests need beyond the package: its [dependency-groups] test."""
    return list(PACKAGES[package].get("dependency-groups", {}).get("test", []))


def others(package: str) -> list[str]:
    """The same without what is of this tree."""
    return [extra for extra in extras(package) if not siblings([extra])]


def everything() -> list[str]:
    """Install arguments for all packages, with what the tests of all need."""
    return [*editable(*PACKAGES), *(extra for package in PACKAGES for extra in others(package)), *SPREADING]


# Every module imports with what its package needs; one that speaks for an extra may want that, and nothing else.
IMPORT_ALL = """
import importlib, importlib.metadata, pkgutil, re
extras = [one for one in importlib.metadata.requires("{distribution}") or () if "extra ==" in one]
extras = [re.match(r"[\\w.-]+", one)[0].lower() for one in extras]
name = "{distribution}".replace("-", "_")
package = importlib.import_module(name)
every = pkgutil.walk_packages(package.__path__, name + ".")
found = [module.name for module in every if module.name != name + ".testing"]  # suites need pytest
for module in found:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not any(error.name.split(".")[0] in (extra.split("-")[0], extra.replace("-", "_")) for extra in extras):
            raise
        print(f"{{module}} wants the extra that brings {{error.name}}")
print(f"{{len(found)}} modules of {{name}} import")
"""

RELEASED = """
from importlib.metadata import version
assert version("{name}") == "{version}", version("{name}")
"""


@nox.session(allow_parallel=True)
def wheel(session: nox.Session) -> None:
    """Build every package, install the wheels instead of the tree, and use them from an empty directory."""
    install(session, "build", "hatchling")
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--wheel", "--outdir", str(dist), f"packages/{name}")
    install(session, *map(str, dist.glob("*.whl")))
    install(
        session, "--force-reinstall", "--no-deps", *map(str, dist.glob("*.whl"))
    )  # a rebuilt wheel keeps its version
    empty = Path(session.create_tmp()) / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    session.chdir(empty)
    session.run("gangline", "plugins")
    session.run("train", "recipe=tiny", "run.steps=3", "run.sample=20", "run.dir=out")
    session.run("train", "resume=out", "run.steps=5")


@nox.session(allow_parallel=True)
def template(session: nox.Session) -> None:
    """Generate a third party's plugin, install it, run its conformance suite."""
    install(session, *editable("core", "testkit"))
    one_thread(session)
    place = Path(session.create_tmp()) / "plugin"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    session.chdir(place)
    session.run("gangline", "new-plugin", "mine")
    install(session, "-e", "gangline-mine")
    session.run("gangline", "plugins")
    session.run("gangline", "conform", "gangline-mine")
    session.chdir("gangline-mine")
    session.run(*PYTEST)


LEARNT = 2.8  # nats a byte after 100 steps; it begins with 5.6, and of single bytes alone nothing is below 3.2


@nox.session(allow_parallel=True)
def train(session: nox.Session) -> None:
    """The main job, a language model on real text, learns: in a third of its steps; the nightly takes all."""
    install(session, *editable("core", "basics", "gangline"))
    out = Path(session.create_tmp()) / "run"
    shutil.rmtree(out, ignore_errors=True)
    session.run("train", f"run.dir={out}", *(session.posargs or ["run.steps=100"]))
    if session.posargs:
        return
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    session.log(f"Held-out loss at step {last['step']}: {last['validation_loss']:.4f}, and {LEARNT} is asked for.")
    if last["step"] != 100 or not all(last[name] <= LEARNT for name in ("loss", "validation_loss")):  # NaN is not
        session.error(f"The main job has not learnt: {last}")


SLURM = ("munge", "slurmctld", "slurmd", "slurm-client")


def install_slurm(session: nox.Session) -> str:
    """Why that cannot be; nothing where it is done."""
    if not shutil.which("apt-get") or os.geteuid():
        return "can install it only as root with apt"
    try:
        session.run("apt-get", "update", "-q", external=True)
        get = ("apt-get", "install", "-q", "-y", "--no-install-recommends")
        session.run(*get, *SLURM, external=True, env={"DEBIAN_FRONTEND": "noninteractive"})
    except CommandFailed:
        return "apt could not install it (is there a network?)"
    return ""


@nox.session  # alone: five nodes on one machine, whose daemons lose each other where it has no time for them
def slurm(session: nox.Session) -> None:
    """A real Slurm on this machine: its packages by apt where they are missing (as root), runs on five nodes."""
    there = shutil.which("sbatch") and shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin")
    if not there and (why_not := install_slurm(session)):
        what = f"needs Slurm, and {why_not}:  apt-get install {' '.join(SLURM)}"
        if "slurm" in ASKED:  # by name, as the public checks do
            session.error(what)
        session.skip(what)
    install(session, *editable("core", "testkit", "launch", "health", "parallel-megatron-style"), *SPREADING)
    one_thread(session)
    session.run(*PYTEST, *AGAIN, "packages/launch/tests_on_slurm", *session.posargs)


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """The long tests, a folder after another: every composition, hundreds of kills, compilation."""
    install(session, *everything())
    one_thread(session)
    # Every process has to draw the same, also where a night has two dates.
    session.env["GANGLINE_DRAWN_SEED"] = os.environ.get("GANGLINE_DRAWN_SEED") or time.strftime("%Y%m%d")
    # Sweeps of one function are shared out too: of long tests none may be left to one core at the end.
    night = (*PYTEST, "-m", "nightly", *SPREAD[:-1], "worksteal")
    if session.posargs:
        session.run(*night, *session.posargs)
        return
    failed = []
    for folder in (*(f"packages/{package}/tests" for package in TESTED), "tests", "docs"):
        try:
            session.run(*night, folder, success_codes=[0, NONE_THERE])
        except CommandFailed:  # the rest of the night is not lost
            failed.append(folder)
    session.notify("light_between")
    if failed:
        session.error(f"Long tests failed in {', '.join(failed)}.")


def entries(built: Path) -> list[str]:
    """The names of what a wheel or an sdist holds."""
    if built.suffix == ".whl":
        with zipfile.ZipFile(built) as wheel:
            return wheel.namelist()
    with tarfile.open(built) as sdist:
        return sdist.getnames()


@nox.session(default=False)
def dist(session: nox.Session) -> None:
    """Build every wheel and sdist into dist/, from a clean clone of the last commit."""
    install(session, "build", "hatchling", "pytest")
    clone = Path(session.create_tmp()) / "clone"
    for path in (clone, DIST):
        shutil.rmtree(path, ignore_errors=True)
    if session.run("git", "status", "--porcelain", external=True, silent=True):
        session.warn("What is not committed is not built.")
    session.run("git", "clone", "--quiet", str(ROOT), str(clone), external=True)
    session.chdir(clone)
    session.run(*PYTEST, "--noconftest", "tests/test_release.py")
    for name in PACKAGES:  # the wheel is built from the sdist, which so proves complete
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST), f"packages/{name}")


@nox.session(default=False, reuse_venv=False, requires=["dist"])
def release(session: nox.Session) -> None:
    """What dist/ holds, installed by name from that folder alone into an empty environment, and used."""
    projects = [each["project"] for each in PACKAGES.values()]
    of_all = {line for project in projects for line in project["dependencies"]}
    theirs = {line for line in of_all if re.split(r"[<>= ]", line)[0] not in {project["name"] for project in projects}}
    for path in sorted(DIST.iterdir()):
        if not any(Path(entry).name == "LICENSE" for entry in entries(path)):
            session.error(f"{path.name} has no LICENSE.")
    install(session, *sorted(theirs))
    session.install("--no-index", "--find-links", str(DIST), "gangline[all]")
    for project in projects:
        session.run("python", "-c", RELEASED.format(**project))
    empty = Path(session.create_tmp()) / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    session.chdir(empty)
    session.run("gangline", "plugins")
    session.run("train", "recipe=tiny", "run.steps=3", "run.dir=out")


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Is a GPU's arithmetic a CPU's, and how near to its peak: in the Python at hand, without a network."""
    session.run("python", "benchmarks/gpu.py", *session.posargs)


# What an image with a GPU build of torch lacks as a rule; `benchmarks/gpu.py` unpacks it from there.
CARRIED = ("annotated-types", "fastcrc", "hydra-core", "omegaconf", "rich", "tokenizers", "safetensors")


@nox.session(default=False)
def gpu_wheels(session: nox.Session) -> None:
    """Wheels in .whl/ for a machine with a GPU and no network; posargs: its Python, such as 3.12, and its kind."""
    python, machine = [*session.posargs, *["3.12", "x86_64"][len(session.posargs) :]]
    install(session, "pip", "setuptools", "wheel")
    wheels = ROOT / ".whl"
    shutil.rmtree(wheels, ignore_errors=True)
    platforms = [f"--platform={name}_{machine}" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    of = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    session.run("pip", "download", *CONSTRAINTS, "--no-deps", *of, "-d", str(wheels), *CARRIED)
    # Pure Python, and published as source alone.
    session.run("pip", "wheel", *CONSTRAINTS, "--no-deps", "-w", str(wheels), "antlr4-python3-runtime")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Print the numbers in benchmarks/."""
    install(session, *editable(*PACKAGES))
    session.run("python", "benchmarks/run.py", *session.posargs)
