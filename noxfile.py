"""Run the checks of the project: `nox` runs the default ones, `nox -l` lists all, `nox -s nightly` runs the long ones.

The list of sessions is computed from packages/*, so a new package needs no line here. nox runs two sessions at a time,
and each session distributes its tests over the CPU cores, because tests that start training runs wait half of their
time (for ranks, timeouts and disks).
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
# Packages with the most tests first: nox starts sessions in the order of this file, so no long session runs alone at
# the end.
TESTED = [name for name in PACKAGES if (ROOT / "packages" / name / "tests").is_dir()]
LARGEST = sorted(TESTED, key=lambda name: -sum(1 for _ in ROOT.glob(f"packages/{name}/tests/**/*.py")))
DIST = ROOT / "dist"
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
PYTEST = ("pytest", "-q", "-m", "not nightly", "--durations=10")
# A test that waits for processes or the clock is retried once (conftest.py), and its first failure is printed. If more
# than three tests need a retry, a busy machine is not the cause, and further failures are final.
AGAIN = ("--rerun-show-tracebacks", "--max-suite-reruns", "3")
# The tests of a class or a file stay in one worker process, because they share fixtures. A worker may start pools of
# eight ranks, so more than 8 workers do not help. conftest.py determines the order.
SPREAD = (*AGAIN, "-n", "auto", "--maxprocesses", "8", "--no-loadscope-reorder", "--dist", "loadscope")
# minimum number of test files for several workers: each worker imports everything again, 7 to 45 s of CPU
FEW_FILES = 16
SPREADING = ("pytest-xdist", "pytest-rerunfailures")
NOTEBOOKS = ("nbclient", "nbformat", "ipykernel")
NONE_THERE = 5  # exit code of pytest if no test has the marker

# Arguments of nox. With parallel sessions each session runs in a separate process, which inherits them by this
# variable.
ASKED = os.environ.setdefault("GANGLINE_NOX_WORDS", " ".join(sys.argv[1:])).split()

# uv compiles no bytecode. With this variable set, every process would compile torch again (an import takes 4 s, not 2).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
nox.options.default_venv_backend = "uv"
nox.options.parallel = 2
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False  # skip a missing Python version; nox reports it
nox.options.download_python = "never"


def pip_find_links() -> str:
    """Return pip's setting find-links, which uv ignores: a folder or URL with wheels, such as a CPU build of torch."""
    if "PIP_FIND_LINKS" in os.environ:
        return os.environ["PIP_FIND_LINKS"]
    for scope in ("global", "install", "site", "user"):
        asked = [sys.executable, "-m", "pip", "config", "get", f"{scope}.find-links"]
        found = subprocess.run(asked, capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.strip()
    return ""


def show_pyenv_pythons() -> None:
    """Make pyenv's shims provide every installed Python version, not only the active one."""
    if shutil.which("pyenv") and "PYENV_VERSION" not in os.environ:
        listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True).stdout.split()
        own = ".".join(map(str, sys.version_info[:3]))
        os.environ["PYENV_VERSION"] = ":".join([own, *(v for v in listed if v != own and v.startswith("3."))])


show_pyenv_pythons()
if "UV_FIND_LINKS" not in os.environ and (links := pip_find_links()):
    os.environ["UV_FIND_LINKS"] = ",".join(links.split())


def editable(*names: str) -> list[str]:
    """Return install arguments for packages of this repository and their dependencies in it; always includes basics."""
    wanted = list(dict.fromkeys((*names, "basics")))
    for name in wanted:  # the list grows during the loop
        wanted += [other for other in siblings(PACKAGES[name]["project"]["dependencies"]) if other not in wanted]
    return [word for name in wanted for word in ("-e", f"packages/{name}")]


def siblings(requirements: list[str]) -> list[str]:
    """Return the packages of this repository that the requirements name."""
    names = (re.match(r"gangline-([a-z-]+)", requirement) for requirement in requirements)
    return [found[1] for found in names if found and found[1] in PACKAGES]


def install(session: nox.Session, *arguments: str) -> None:
    """Install everything in one command, so that packages of this repository find each other.

    Editable packages are listed in a requirements file. uv rebuilds editable packages of the command line each time
    (0.4 s of CPU per package and session), but those of a file only after their pyproject.toml changes.
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
    """Hard-link the bytecode that other nox environments have compiled; compiling torch alone takes 6 s of CPU.

    Python compares the size and modification time of each source file with its bytecode. Both are equal in all
    environments, because uv links the files from its cache.
    """
    for site in environment.glob("lib/python*/site-packages"):
        for package in [path for path in site.iterdir() if path.is_dir() and not (path / "__pycache__").exists()]:
            for other in environment.parent.glob(f"*/lib/{site.parent.name}/site-packages/{package.name}"):
                for compiled in other.rglob("__pycache__"):
                    target = package / compiled.relative_to(other)
                    if target.parent.is_dir():
                        with suppress(OSError):  # already exists, or another process writes it
                            shutil.copytree(compiled, target, copy_function=os.link)


def one_thread(session: nox.Session) -> None:
    """Set one OpenMP thread per process, because several ranks of a test share a few cores."""
    session.env["OMP_NUM_THREADS"] = "1"


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Check style, imports and formatting."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(allow_parallel=True)
def types(session: nox.Session) -> None:
    """Check the static types of every package and of the benchmarks."""
    install(session, "mypy", "pytest", "matplotlib", *editable(*PACKAGES))
    scripts = [*sorted(ROOT.glob("benchmarks/*.py")), ROOT / "benchmarks" / "published"]
    session.run("mypy", *map(str, [*sorted(ROOT.glob("packages/*/src/*")), *scripts]))


@nox.session(allow_parallel=True)
def together(session: nox.Session) -> None:
    """Run the tests in tests/, which need several packages, with all packages installed."""
    install(session, *everything())
    one_thread(session)
    session.run(*PYTEST, *SPREAD, "tests", *session.posargs)


@nox.session(allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Run every example and notebook of the documentation, and check that it describes every hook and option."""
    install(session, *editable(*PACKAGES), "matplotlib", *NOTEBOOKS, *SPREADING)
    one_thread(session)
    session.run(*PYTEST, *SPREAD[:-1], "worksteal", "docs", *session.posargs)


@nox.session(allow_parallel=True)
def site(session: nox.Session) -> None:
    """Build the documentation site in site/. Warnings are errors, and no page may load anything from another host."""
    install(session, "mkdocs-material", *editable("core", "testkit"))
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "docs/site_checks.py", "site")


@nox.session(allow_parallel=True)
def browser(session: nox.Session) -> None:
    """Open the HTML reports of real runs in a headless Chromium, which is downloaded once from the npm registry."""
    if not (shutil.which("npm") and shutil.which("node")):
        what = "needs npm and node, to download a browser:  apt-get install nodejs npm"
        if "browser" in ASKED or "CI" in os.environ:  # requested by name, or by a CI
            session.error(what)
        session.skip(what)
    install(session, *editable("core", "basics", "testkit"), "matplotlib", *SPREADING)
    one_thread(session)
    session.env["GANGLINE_BROWSER_CACHE"] = str(ROOT / ".nox" / ".browser")
    session.run(*PYTEST, *AGAIN, "packages/basics/tests_in_browser", *session.posargs)


@nox.session(allow_parallel=True)
def fake_cuda(session: nox.Session) -> None:
    """Run training on a fake CUDA device, built with g++: gangline's code for GPUs computes on a CPU."""
    if not shutil.which("g++"):
        what = "needs a C++ compiler, to build the device:  apt-get install g++"
        if "fake_cuda" in ASKED or "CI" in os.environ:  # requested by name, or by a CI
            session.error(what)
        session.skip(what)
    install(session, *editable(*PACKAGES), "triton>=3.4; sys_platform == 'linux'", "matplotlib", *SPREADING)
    one_thread(session)
    session.env["XDG_CACHE_HOME"] = str(ROOT / ".nox" / ".fake_cuda")
    plugin = ("-p", "gangline_testkit.fake_cuda.plugin")
    session.run(*PYTEST, *plugin, "-n", "2", "--dist", "worksteal", "tests_on_fake_cuda", *session.posargs)


@nox.session(allow_parallel=True)
@nox.parametrize("package", LARGEST, ids=LARGEST)
def tests(session: nox.Session, package: str) -> None:
    """Run the tests of one package, with no other plugin installed than it needs.

    For a plugin, first import all its modules without the dependencies of the tests.
    """
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
    """Run the linter, and for 90 s the tests of the packages after `--`, or else of the changed packages."""
    packages = [word for word in session.posargs if word in PACKAGES] or changed()
    install(session, "ruff", *everything())
    one_thread(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    folders = [f"packages/{package}/tests" for package in packages] or ["tests", "docs"]
    more = [word for word in session.posargs if word not in PACKAGES]
    session.log(f"Tests of {', '.join(folders)}; changed and short tests run first.")
    # no grouping by file, so the order of the tests is kept
    spread = (*SPREAD[:-2], "--dist", "load", "--maxschedchunk", "1")
    session.run(*PYTEST, *spread, "--seconds", "90", *folders, *more)


def changed() -> list[str]:
    """Return the packages with uncommitted changes, or, without any, the packages changed by the last commit."""
    for command in (["git", "status", "--porcelain"], ["git", "show", "--name-only", "--format="]):
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        if said.strip():
            return [name for name in PACKAGES if f"packages/{name}/" in said]
    return []


# Tests of modules that the command line imports; they pass without torch.
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
    """Run the tests that need no torch, without torch, on the newest supported Python."""
    torch_free(session)


@nox.session(python="3.12", default=False)
def light_between(session: nox.Session) -> None:
    """Run the same tests as `light` on the Python between the oldest and the newest; part of the nightly tests."""
    torch_free(session)


def torch_free(session: nox.Session) -> None:
    """Run the tests that need no torch, in an environment without torch."""
    install(session, "annotated-types", "numpy", "hydra-core", "pluggy", "rich", "pytest", "hypothesis")
    install(session, "--no-deps", *editable("core", "testkit"))
    files = [f"packages/core/tests/test_{name}.py" for name in TORCH_FREE]
    session.run(*PYTEST, *files, "packages/basics/tests/test_schedule.py", *session.posargs)


@nox.session(python=["3.12", "3.13"], allow_parallel=True)
def readers(session: nox.Session) -> None:
    """Read a checkpoint with the newest zarr, in an environment without torch."""
    session.install("annotated-types", "numpy", "hydra-core", "pluggy", "rich", "pytest")
    session.install("zarr", "fsspec", "fastcrc", "crc32c")
    install(session, "--no-deps", *editable("core", "ckpt-zarr"))
    session.run(*PYTEST, "packages/ckpt-zarr/tests/test_readers.py", *session.posargs)


def extras(package: str) -> list[str]:
    """Return the test dependencies of a package: the group `test` of its [dependency-groups]."""
    return list(PACKAGES[package].get("dependency-groups", {}).get("test", []))


def others(package: str) -> list[str]:
    """Return the test dependencies of a package that are not packages of this repository."""
    return [extra for extra in extras(package) if not siblings([extra])]


def everything() -> list[str]:
    """Return install arguments for all packages and the test dependencies of all."""
    return [*editable(*PACKAGES), *(extra for package in PACKAGES for extra in others(package)), *SPREADING]


# Every module must import with the dependencies of its package. A module may also need a package of an extra.
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
        print(f"{{module}} needs an extra that installs {{error.name}}")
print(f"checked the imports of {{len(found)}} modules of {{name}}")
"""

RELEASED = """
from importlib.metadata import version
assert version("{name}") == "{version}", version("{name}")
"""


def documented_installs() -> list[list[str]]:
    """Return the packages of every `pip install gangline...` in the README and the docs. Raises ValueError for none."""
    package = r"""['"]?(gangline[\w-]*(?:\[[\w,]+\])?)['"]?"""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
    lists = [
        re.findall(package, words)
        for page in pages
        for words in re.findall(rf"pip\s+install\s+((?:{package.replace('(gang', '(?:gang')}\s*)+)", page.read_text())
    ]
    if not lists:
        raise ValueError("no page names a package to install")
    return [list(words) for words in sorted(set(map(tuple, lists)))]


@nox.session(allow_parallel=True)
def wheel(session: nox.Session) -> None:
    """Build a wheel of every package, install the wheels, and use them from an empty directory."""
    install(session, "build", "hatchling")
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--wheel", "--outdir", str(dist), f"packages/{name}")
    install(session, *map(str, dist.glob("*.whl")))
    install(
        session, "--force-reinstall", "--no-deps", *map(str, dist.glob("*.whl"))
    )  # rebuilt wheels have the same version
    asked = ("uv", "pip", "install", "--dry-run", *CONSTRAINTS, "--find-links", str(dist))
    for words in documented_installs():  # every `pip install gangline...` of the docs can be installed
        session.run(*asked, *words, external=True, silent=True)
    empty = Path(session.create_tmp()) / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    session.chdir(empty)
    session.run("gangline", "plugins")
    session.run("train", "recipe=tiny", "run.steps=3", "run.sample=20", "run.dir=out")
    session.run("train", "resume=out", "run.steps=5")


@nox.session(allow_parallel=True)
def template(session: nox.Session) -> None:
    """Generate a third-party plugin, install it, and run its conformance suite."""
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


# maximum loss in nats per byte after 100 steps; the loss starts at 5.6, and a model of single bytes cannot go below 3.2
MAX_LOSS = 2.8


@nox.session(allow_parallel=True)
def train(session: nox.Session) -> None:
    """Check that the default run, a language model on real text, learns within 100 steps."""
    install(session, *editable("core", "basics", "gangline"))
    out = Path(session.create_tmp()) / "run"
    shutil.rmtree(out, ignore_errors=True)
    session.run("train", f"run.dir={out}", *(session.posargs or ["run.steps=100"]))
    if session.posargs:
        return
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    session.log(f"Validation loss at step {last['step']}: {last['validation_loss']:.4f} (maximum {MAX_LOSS}).")
    if last["step"] != 100 or not all(last[name] <= MAX_LOSS for name in ("loss", "validation_loss")):  # false for NaN
        session.error(f"The losses of the main job are above {MAX_LOSS} nats, or it did not reach step 100: {last}")


SLURM = ("munge", "slurmctld", "slurmd", "slurm-client")


def install_slurm(session: nox.Session) -> str:
    """Install Slurm. Return the reason if that is impossible, else ""."""
    if not shutil.which("apt-get") or os.geteuid():
        return "can install it only as root with apt"
    try:
        session.run("apt-get", "update", "-q", external=True)
        get = ("apt-get", "install", "-q", "-y", "--no-install-recommends")
        session.run(*get, *SLURM, external=True, env={"DEBIAN_FRONTEND": "noninteractive"})
    except CommandFailed:
        return "apt could not install it (is there a network?)"
    return ""


@nox.session  # not parallel: a busy machine makes the daemons of the five nodes lose each other
def slurm(session: nox.Session) -> None:
    """Run the tests on a real Slurm with five nodes on this machine. As root, installs a missing Slurm with apt."""
    there = shutil.which("sbatch") and shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin")
    if not there and (why_not := install_slurm(session)):
        what = f"needs Slurm, and {why_not}:  apt-get install {' '.join(SLURM)}"
        if "slurm" in ASKED:  # requested by name, as the public CI does
            session.error(what)
        session.skip(what)
    install(session, *editable("core", "testkit", "launch", "health", "parallel-megatron-style"), *SPREADING)
    one_thread(session)
    session.run(*PYTEST, *AGAIN, "packages/launch/tests_on_slurm", *session.posargs)


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """Run the long tests, one folder after another: all compositions, hundreds of kills, compilation."""
    install(session, *everything())
    one_thread(session)
    # All processes must use the same random seed, also if the date changes during the run.
    session.env["GANGLINE_DRAWN_SEED"] = os.environ.get("GANGLINE_DRAWN_SEED") or time.strftime("%Y%m%d")
    # Parametrized tests of one function are distributed too, so that no core runs many long tests alone at the end.
    night = (*PYTEST, "-m", "nightly", *SPREAD[:-1], "worksteal")
    if session.posargs:
        session.run(*night, *session.posargs)
        return
    failed = []
    for folder in (*(f"packages/{package}/tests" for package in TESTED), "tests", "docs"):
        try:
            session.run(*night, folder, success_codes=[0, NONE_THERE])
        except CommandFailed:  # continue with the other folders
            failed.append(folder)
    session.notify("light_between")
    if failed:
        session.error(f"Long tests failed in {', '.join(failed)}.")


def entries(built: Path) -> list[str]:
    """Return the file names in a wheel or an sdist."""
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
        session.warn("Uncommitted changes are not built.")
    session.run("git", "clone", "--quiet", str(ROOT), str(clone), external=True)
    session.chdir(clone)
    session.run(*PYTEST, "--noconftest", "tests/test_release.py")
    for name in PACKAGES:  # building the wheel from the sdist proves that the sdist is complete
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST), f"packages/{name}")


@nox.session(default=False, reuse_venv=False, requires=["dist"])
def release(session: nox.Session) -> None:
    """Install the packages by name from dist/ alone into an empty environment, and use them."""
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
    """Compare GPU results with CPU results, and measure GPU throughput, with the current Python and no network."""
    session.run("python", "benchmarks/gpu.py", *session.posargs)


# Packages that an image with a GPU build of torch usually lacks; `benchmarks/gpu.py` unpacks their wheels from .whl/.
CARRIED = ("annotated-types", "fastcrc", "hydra-core", "omegaconf", "rich", "tokenizers", "safetensors")


@nox.session(default=False)
def gpu_wheels(session: nox.Session) -> None:
    """Download wheels into .whl/ for a GPU machine without network; posargs: Python version (3.12), architecture."""
    python, machine = [*session.posargs, *["3.12", "x86_64"][len(session.posargs) :]]
    install(session, "pip", "setuptools", "wheel")
    wheels = ROOT / ".whl"
    shutil.rmtree(wheels, ignore_errors=True)
    platforms = [f"--platform={name}_{machine}" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    of = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    session.run("pip", "download", *CONSTRAINTS, "--no-deps", *of, "-d", str(wheels), *CARRIED)
    # Pure Python, published only as an sdist.
    session.run("pip", "wheel", *CONSTRAINTS, "--no-deps", "-w", str(wheels), "antlr4-python3-runtime")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run all benchmarks and print their numbers."""
    install(session, *editable(*PACKAGES))
    session.run("python", "benchmarks/run.py", *session.posargs)
