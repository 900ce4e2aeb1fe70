"""Default parts of a run, and runs built in plain Python. Imports no Hydra."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gangline.config.schema import EditConfig, PartConfig, Run
from gangline.config.sections import SECTIONS
from gangline.errors import UserError
from gangline.plugin import catalogue
from gangline.plugin.hooks import GROUPS, LISTS
from gangline.plugin.registry import OFF, installed


def get_default_choices() -> dict[str, str | list[str]]:
    """Return core group -> name of its default part; for a list group, the names of its default parts.

    Defaults are installed parts with `Part.default`. For a group without such a part, the catalogue names the defaults.
    """
    choices: dict[str, str | list[str]] = {}
    for group in GROUPS:
        offers = installed().get_offers(group).values()
        names = [offer.part.name for offer in offers if offer.part.default] or catalogue.list_defaults(group)
        choices[group] = names if group in LISTS else "".join(names[:1])
    return choices


def build_default_part(group: str) -> PartConfig:
    """Return the options of the default part of a group. Raises UserError if that part is not installed."""
    return _build_config(group, str(get_default_choices()[group]))


def build_default_run(**given: Any) -> Run:
    """Return a complete run of default sections and parts, except the sections and groups in `given`.

    A section takes its dataclass or a dict: ``run=RunSection(steps=3)``, ``batch={"global_size": 4}``. A group takes
    the name of a part or its configuration: ``model="tiny"``, ``optimizer=Adamw(learning_rate=1e-3)``; `track`,
    `health` and `callback` take a list of names or configurations. Raises UserError for a part that is not installed
    and for a group that does not exist.
    """
    sections = {}
    for name, section in SECTIONS.items():
        value = given.pop(name, None)
        sections[name] = section(**value) if isinstance(value, Mapping) else value or section()
    parts: dict[str, Any] = {}
    edits: dict[str, EditConfig] = {}
    extra: dict[str, PartConfig] = {}
    usual = get_default_choices()
    for group, choice in {**usual, **given}.items():
        if group in LISTS:
            parts[group] = dict(_build_member(group, one) for one in _as_list(choice))
        elif group in usual:
            parts[group] = _build_config(group, choice)
        elif choice not in (None, False, OFF):
            config = _build_config(group, choice)
            if isinstance(config, EditConfig):
                edits[group] = config
            else:
                extra[group] = config
    return Run(job=sections.pop("run"), **sections, **parts, edits=edits, extra=extra)


def _build_config(group: str, choice: str | bool | PartConfig) -> PartConfig:
    if isinstance(choice, PartConfig):
        offer = installed().find_part(choice)
        if offer.group != group:
            raise UserError(f"{type(choice).__name__} configures {offer.group}={offer.part.name}, not a {group}.")
        return choice
    return installed().find(group, "on" if choice is True else str(choice)).part.config()


def _as_list(choice: Any) -> Iterable[Any]:
    if isinstance(choice, Mapping):
        return list(choice.values())
    return choice if isinstance(choice, list | tuple) else [choice]


def _build_member(group: str, choice: str | PartConfig) -> tuple[str, PartConfig]:
    config = _build_config(group, choice)
    return installed().find_part(config).part.name, config
