"""Configuration of a run: its parts, the options that differ from their defaults, and all options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element

from gangline.config.fields import REQUIRED, iterate_options
from gangline.config.sections import SECTIONS
from gangline.errors import UserError
from gangline.plugin.registry import installed
from gangline.run.redaction import redact
from gangline_basics.runs.compare import flatten_options
from gangline_basics.runs.report.history import History
from gangline_basics.runs.report.markup import make, make_details, make_note, make_section, make_table

ABSENT = object()


def show_settings(history: History) -> Element:
    """Return the section of the configuration."""
    config = history.config
    if not config:
        return make_section("Configuration", make_note("config.yaml is missing or damaged."))
    parts = {group: spell(group, choice) for group, choice in dict(config.get("parts") or {}).items()}
    options = flatten_options({key: value for key, value in config.items() if key != "parts"})
    problems: list[str] = []
    defaults = dict(iterate_defaults(config, problems))
    different = [
        (key, spell(key, value), "none" if default in (ABSENT, REQUIRED) else spell(key, default))
        for key, value in options.items()
        if (default := defaults.get(key, ABSENT)) != value and not (default is ABSENT and value == {})
    ]
    rows = [(key, spell(key, value)) for key, value in options.items()]
    return make_section(
        "Configuration",
        make(
            "div",
            make("div", make("h3", "Parts"), make_table(("group", "part"), list(parts.items()))),
            make(
                "div",
                make("h3", "Options that differ from their defaults"),
                make_table(("option", "value", "default"), different) if different else make("p", "None."),
            ),
            class_="figures",
        ),
        *map(make_note, problems),
        make_details(f"All {len(options)} options", make_table(("option", "value"), rows)),
    )


def iterate_defaults(config: dict[str, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (option, default) of the sections and the chosen parts; append a sentence for a part that is missing."""
    classes: list[tuple[str, type, dict[str, type]]] = [(name, section, {}) for name, section in SECTIONS.items()]
    choices = dict(config.get("parts") or {})
    for group, choice in choices.items():
        for name in choice if isinstance(choice, list) else [choice]:
            if "/" in group or name in (None, False, "off"):
                continue
            try:
                part = installed().find(group, "on" if name is True else str(name)).part
                inner = {field: str(choices.get(f"{group}/{field}", default)) for field, default in part.opens.items()}
                opened = {field: installed().find(f"{group}/{field}", one).part.config for field, one in inner.items()}
            except UserError as error:
                problems.append(f"Defaults of {group}={name} are not known: {str(error).splitlines()[0]}")
                continue
            classes.append((f"{group}.{name}" if isinstance(choice, list) else group, part.config, opened))
    for path, options, opened in classes:
        for option in iterate_options(options, path, opened):
            yield from flatten_options({option.path: option.default}).items()


def spell(key: str, value: Any) -> str:
    """Return a value as config.yaml spells it, without secrets; references to the environment stay references."""
    if isinstance(value, list):
        return ", ".join(spell(key, item) for item in value) or "[]"
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return redact(f"{key}={text}").partition("=")[2]
