"""Catalogue of parts and the packages that supply them, installed or not, so that errors say what to install.

docs/reference.py writes `catalogue.json`, next to this file, from the parts of the packages in the repository.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

DATA = Path(__file__).with_suffix(".json")
TREE = Path(__file__).resolve().parents[4]  # directory of the packages in a source tree


@dataclass(frozen=True)
class KnownPart:
    """One part that a distribution is known to supply."""

    group: str
    name: str
    distribution: str
    summary: str
    edit: bool = False  # whether the part is a model edit, whose group offers `off` even if no part is installed
    default: bool = False  # whether the part is a default of its group (`Part.default`)


_CONTENT = json.loads(DATA.read_text(encoding="utf-8"))
ENTRIES = tuple(KnownPart(**entry) for entry in _CONTENT["parts"])
VERBS: dict[str, str] = _CONTENT["verbs"]  # verb of `gangline` -> the distribution that supplies it
WORDS: dict[str, str] = _CONTENT["words"]  # words of other frameworks -> what to type (`Part.words`)
SYNONYMS: dict[str, str] = _CONTENT["synonyms"]  # path of an option -> its names in other frameworks
PEERS: dict[str, str] = _CONTENT["peers"]  # full option of another framework -> option of gangline, or what to type


def get(distribution: str) -> str:
    """Return the command that installs a distribution: from its source code next to core, else by name."""
    sibling = TREE / distribution.removeprefix("gangline-")
    return f"pip install -e {sibling}" if (sibling / "pyproject.toml").is_file() else f"pip install {distribution}"


def explain_missing(error: ModuleNotFoundError) -> list[str]:
    """Return lines with the missing package and its install command; [] if the catalogue does not have the package."""
    package = (error.name or "").partition(".")[0]
    distribution = package.replace("_", "-")
    distributions = {*(entry.distribution for entry in ENTRIES), *VERBS.values()}
    if distribution not in distributions or find_spec(package):
        return []
    return [f"{distribution}, which is not installed", f"To install the package:  {get(distribution)}"]


def find_supplier(group: str, name: str) -> str | None:
    """Return the distribution that is known to supply `group=name`, or None."""
    part = next((entry for entry in ENTRIES if entry.group == group and entry.name == name), None)
    return part.distribution if part else None


def find_suppliers(group: str) -> dict[str, str]:
    """Return distribution -> names of the parts of `group` that it is known to supply, comma-separated."""
    parts: dict[str, list[str]] = {}
    for entry in ENTRIES:
        if entry.group == group:
            parts.setdefault(entry.distribution, []).append(entry.name)
    return {dist: ", ".join(names) for dist, names in parts.items()}


def list_groups() -> list[str]:
    """Return every group in the catalogue."""
    return list(dict.fromkeys(entry.group for entry in ENTRIES))


def edit_groups() -> set[str]:
    """Return the groups of model edits in the catalogue."""
    return {entry.group for entry in ENTRIES if entry.edit}


def list_defaults(group: str) -> list[str]:
    """Return the default parts of `group` in the catalogue."""
    return [entry.name for entry in ENTRIES if entry.group == group and entry.default]


def list_names(group: str) -> list[str]:
    """Return the names of the parts of `group` in the catalogue."""
    return [entry.name for entry in ENTRIES if entry.group == group]
