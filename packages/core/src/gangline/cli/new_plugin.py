"""`gangline new-plugin NAME`: a plugin that installs, shows up, runs and passes its conformance suite.

The code of a new plugin is the example in the docstring of its hook (`gangline.hooks`), under another name: what is
documented, what is tested and what authors start from are one text. The smallest, a tracker, stands here.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gangline import hooks
from gangline.errors import UserError
from gangline.parts import GROUPS, LISTS
from gangline.plugins import installed

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

TRACKER = """\
# gangline_mine.py: a line for each step. train 'track=[console,mine]' track.mine.word=loss
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.parts import TrackConfig
from gangline.track import Tracker


@dataclass
class Mine(TrackConfig):
    word: str = "mine"  # what each line begins with


class MineTracker(Tracker):
    def __init__(self, config, run):
        self.word = config.word

    def record(self, record):
        print(self.word, record.step, record.loss)


@hookimpl
def gangline_parts():
    yield Part(group="track", name="mine", config=Mine, build="gangline_mine:MineTracker", summary="A line a step")
"""

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "gangline-{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["gangline>=0.1,<1"]  # the contract's major version is the cap

[project.entry-points."gangline.v1"]
{name} = "{module}"
"""

TEST = """\
from gangline.testing import {suite}


class Test{title}({suite}):
    choice = "{choice}"
    can = set()  # what the part claims; the suite warns of what it could claim besides
"""

KEPT_IN = """
    def kept_in(self, directory):
        return (f"checkpoint.folder={{directory}}/elsewhere",)
"""

README = """\
# gangline-{name}

    pip install -e . 'gangline[testing]'
    gangline plugins                       # shows {choice}
    train {use}
    pytest                                 # the conformance suite
    gangline conform gangline-{name}

A comment beside each option is its help. The contract of this kind of part is in the documentation of gangline,
under the hook `{hook}`.
"""


@dataclass(frozen=True)
class Kind:
    """One kind of plugin: the hook it implements, the example it starts from, the suite it passes."""

    hook: str
    example: str  # the name that the example goes by
    suite: str
    choice: str  # with {name}
    summary: str
    more: str = ""  # what its example's test says besides

    def code(self) -> str:
        """The example, as it stands in the documentation."""
        if self.example == "mine":
            return TRACKER
        text = inspect.getdoc(getattr(hooks, self.hook)) or ""
        return textwrap.dedent(text.partition("::\n\n")[2]).strip() + "\n"


KINDS = {
    "tracker": Kind("gangline_parts", "mine", "TrackerSuite", "track={name}", "where records go"),
    "health": Kind("gangline_health_checks", "ceiling", "HealthCheckSuite", "health={name}", "a check of the run"),
    "data": Kind("gangline_data_sources", "counting", "DataSourceSuite", "data={name}", "what a run reads"),
    "precision": Kind("gangline_precisions", "coarse", "PrecisionSuite", "precision={name}", "how it computes"),
    "edit": Kind("gangline_parts", "narrow", "ModelEditSuite", "{name}=on", "a change of the model"),
    "checkpoint": Kind(
        "gangline_checkpointers", "elsewhere", "CheckpointerSuite", "checkpoint={name}", "keeps state", KEPT_IN
    ),
    "strategy": Kind("gangline_parallel_strategies", "watched", "StrategySuite", "parallel={name}", "cuts the run"),
}


def main(argv: Sequence[str]) -> int:
    """Write ./gangline-NAME. Raises UserError for a name that is taken or no name, and where the directory exists."""
    parser = argparse.ArgumentParser(prog="gangline new-plugin", description="Write a plugin to start from.")
    parser.add_argument("name", help="what users will type: 'mine' makes the distribution gangline-mine")
    kinds = ", ".join(f"{name} ({kind.summary})" for name, kind in KINDS.items())
    parser.add_argument("--kind", default="tracker", choices=KINDS, metavar="KIND", help=f"one of: {kinds}")
    options = parser.parse_args(argv)
    folder = write(options.name.removeprefix("gangline-"), options.kind, Path.cwd())
    print(f"wrote {folder.name}/\n")
    print(f"  cd {folder.name}\n  pip install -e . 'gangline[testing]'\n  gangline plugins\n  pytest")
    return 0


def write(name: str, kind: str, where: Path) -> Path:
    """The plugin `gangline-<name>` of one kind in a new directory of `where`; the directory."""
    chosen, folder = KINDS[kind], where / f"gangline-{name}"
    _refuse(name, chosen, folder)
    for path, text in files(name, kind).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def files(name: str, kind: str) -> dict[str, str]:
    """Path -> content of every file of a new plugin."""
    chosen, module = KINDS[kind], f"gangline_{name.replace('-', '_')}"
    choice = chosen.choice.format(name=name.replace("-", "_") if kind == "edit" else name)
    group, _, _ = choice.partition("=")
    use = f"'{group}=[{'console,' if group == 'track' else ''}{name}]'" if group in LISTS else choice
    names = {"name": name, "module": module, "title": _title(name), "choice": choice, "use": use}
    return {
        "pyproject.toml": PYPROJECT.format(**names),
        "README.md": README.format(**names, hook=chosen.hook),
        f"{module}.py": renamed(chosen.code(), chosen.example, name, kind),
        "tests/test_conformance.py": (TEST + chosen.more).format(**names, suite=chosen.suite),
    }


def renamed(code: str, example: str, name: str, kind: str) -> str:
    """The example's code with its name replaced: of the module, of the classes, of the part."""
    part = name.replace("-", "_") if kind == "edit" else name
    code = code.replace(f"gangline_{example}", f"gangline_{name.replace('-', '_')}")
    code = re.sub(rf"\b{example.title()}(?=[A-Z]|\b)", _title(name), code)
    return re.sub(rf"\b{example}\b", part, code)


def _title(name: str) -> str:
    return "".join(word.title() for word in name.split("-"))


def _refuse(name: str, kind: Kind, folder: Path) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be the name of a plugin.",
            "A name is lower-case letters and digits, with '-' between words.",
        )
    group = kind.choice.format(name=name).partition("=")[0]
    if folder.exists():
        raise UserError(f"{folder.name} is already here.", "Choose another name, or move it away.")
    if group == name and name in GROUPS:
        raise UserError(f"{name} is a group of gangline itself.", "Choose another name.")
    if group in GROUPS and name in installed().offers(group):
        offer = installed().offers(group)[name]
        raise UserError(f"{group}={name} exists; it is supplied by {offer.distribution}.", "Choose another name.")
