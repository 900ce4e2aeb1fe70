"""Who supplies what, installed or not: so that a wish that cannot be met here still gets an answer.

`catalogue.json` beside this file is written by docs/reference.py from what the packages of the repository offer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

DATA = Path(__file__).with_suffix(".json")
TREE = Path(__file__).resolve().parents[4]  # of core's own source: where its siblings lie


@dataclass(frozen=True)
class KnownPart:
    """One part that some distribution is known to supply."""

    group: str
    name: str
    distribution: str
    summary: str
    edit: bool = False  # a model edit: its group has `off` even where nothing supplies the group
    default: bool = False  # as of `Part`


_CONTENT = json.loads(DATA.read_text(encoding="utf-8"))
ENTRIES = tuple(KnownPart(**entry) for entry in _CONTENT["parts"])
VERBS: dict[str, str] = _CONTENT["verbs"]  # verbs of `gangline` -> the distribution that they come with
WORDS: dict[str, str] = _CONTENT["words"]  # words of other frameworks that a part answers, as `Part.words` has them
SYNONYMS: dict[str, str] = _CONTENT["synonyms"]  # path of an option -> what other frameworks call it


def get(distribution: str) -> str:
    """The command that installs a distribution: from beside core where its source lies there, else by name."""
    sibling = TREE / distribution.removeprefix("gangline-")
    return f"pip install -e {sibling}" if (sibling / "pyproject.toml").is_file() else f"pip install {distribution}"


def explain_missing(error: ModuleNotFoundError) -> list[str]:
    """Of a known package that could not be imported, what it is and what to type; [] for a module of anything else."""
    package = (error.name or "").partition(".")[0]
    distribution = package.replace("_", "-")
    distributions = {*(entry.distribution for entry in ENTRIES), *VERBS.values()}
    if distribution not in distributions or find_spec(package):
        return []
    return [f"{distribution}, which is not installed", f"It comes with  {get(distribution)}"]


def find_supplier(group: str, name: str) -> str | None:
    """The distribution that is known to supply `group=name`, or None."""
    part = next((entry for entry in ENTRIES if entry.group == group and entry.name == name), None)
    return part.distribution if part else None


def find_suppliers(group: str) -> dict[str, str]:
    """Distributions known to supply parts of `group` -> the parts, as words."""
    parts: dict[str, list[str]] = {}
    for entry in ENTRIES:
        if entry.group == group:
            parts.setdefault(entry.distribution, []).append(entry.name)
    return {dist: ", ".join(names) for dist, names in parts.items()}


def list_groups() -> list[str]:
    """Every group that the catalogue knows."""
    return list(dict.fromkeys(entry.group for entry in ENTRIES))


def edit_groups() -> set[str]:
    """The groups of model edits among them."""
    return {entry.group for entry in ENTRIES if entry.edit}


def list_defaults(group: str) -> list[str]:
    """What a run has of `group` where nobody chooses."""
    return [entry.name for entry in ENTRIES if entry.group == group and entry.default]


def list_names(group: str) -> list[str]:
    """The parts of `group` known by name."""
    return [entry.name for entry in ENTRIES if entry.group == group]
