"""Conversion of a run to plain data and back: config.yaml, which ranks read. Imports neither torch nor Hydra.

Next to the values, `parts` has the choice in each group:

    parts: {model: tiny, track: [console, jsonl], ...}
    model: {vocab_size: 256, ...}
    track: {jsonl: {...}}

A value may refer to the environment, ``${oc.env:NAME}`` or ``${oc.env:NAME,default}``, as in OmegaConf. Each start
looks up the variable again; files contain the reference and never the value, so that no secret is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from gangline.config.fields import REQUIRED, get_defaults, get_opened_defaults, resolve_hints
from gangline.config.ranges import list_choices
from gangline.config.schema import EditConfig, PartConfig, Run
from gangline.config.sections import SECTIONS
from gangline.config.suggest import answer, suggest_near, suggest_synonym
from gangline.config.values import InvalidValue, convert, describe, spell, to_plain
from gangline.errors import Problem, UserError
from gangline.plugin.hooks import GROUPS, LISTS, SINGLE
from gangline.plugin.registry import OFF, Offer, installed

ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*(?:,([^}]*))?\}")


def to_dict(run: Run) -> dict[str, Any]:
    """Return the complete run as dicts, lists, strings, numbers, booleans and None."""
    parts: dict[str, Any] = {}
    content: dict[str, Any] = {"parts": parts}
    content.update({name: to_plain(section) for name, section in run.iterate_sections()})
    for group in SINGLE:
        parts[group], content[group] = _convert_part(group, getattr(run, group), parts)
    for group in LISTS:
        configs: dict[str, PartConfig] = getattr(run, group)
        content[group] = {name: to_plain(config) for name, config in configs.items()}
        parts[group] = list(configs)
    for group, config in {**run.edits, **run.extra}.items():
        parts[group], content[group] = _convert_part(group, config, parts)
    for path, reference in run.references.items():
        *way, last = path.split(".")
        place: Any = content
        for step in way:
            place = place[step]
        place[last] = reference
    return content


def _convert_part(group: str, config: PartConfig, parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    part = installed().find_part(config).part
    for name in part.opens:
        parts[f"{group}/{name}"] = installed().find_part(getattr(config, name)).part.name
    return part.name, to_plain(config)


def from_dict(content: Mapping[str, Any]) -> Run:
    """Return the typed run. Raises UserError that lists every unknown key and every value that does not fit."""
    content = dict(content)
    references: dict[str, str] = {}
    values = _expand({key: item for key, item in content.items() if key != "parts"}, "", references)
    choices = dict(content.get("parts") or {})
    problems: list[Problem] = []
    arguments: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        arguments[name] = fill(cls, values.pop(name, None), name, problems)
    for group in SINGLE:
        if group not in choices:
            problems.append(
                Problem(f"the configuration does not choose a part for {group}.", "", f"Write parts: {{{group}: ...}}.")
            )
            continue
        arguments[group] = _configure(group, str(choices.pop(group)), values.pop(group, None), choices, problems)
    for group in LISTS:
        section = values.pop(group, None) or {}
        names = choices.pop(group, None) or []
        arguments[group] = {n: _configure(group, n, section.pop(n, None), {}, problems, f"{group}.{n}") for n in names}
        problems += [Problem(f"{group}.{n} is set, but {n} is not chosen.", "", f"{group}=[...,{n}]") for n in section]
    edits: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for group in [group for group in choices if "/" not in group]:
        name = choices.pop(group)
        if name not in (None, False, OFF):
            config = _configure(group, "on" if name is True else str(name), values.pop(group, None), choices, problems)
            (edits if isinstance(config, EditConfig) else extra)[group] = config
    problems += [
        Problem(f"{name}={part}: the chosen parts do not have the group {name}.") for name, part in choices.items()
    ]
    problems += [Problem(f"there is no section {name}.", suggest_near(name, [*SECTIONS, *GROUPS])) for name in values]
    if problems:
        raise UserError.of(problems)
    return Run(job=arguments.pop("run"), **arguments, edits=edits, extra=extra, references=references)


def _configure(
    group: str, name: str, values: Any, chosen: dict[str, Any], problems: list[Problem], path: str = ""
) -> PartConfig | None:
    """Return the configuration of one part, None if it has problems; remove choices inside it from `chosen`."""
    offer = installed().find(group, name)
    inner_classes = {}
    for field, default in offer.part.opens.items():
        inner = installed().find(f"{group}/{field}", str(chosen.pop(f"{group}/{field}", default)))
        inner_classes[field] = inner.part.config
    return fill(offer.part.config, values, path or group, problems, inner_classes, offer)


def fill(
    cls: type,
    values: Any,
    path: str,
    problems: list[Problem],
    opened: Mapping[str, type] | None = None,
    offer: Offer | None = None,
) -> Any:
    """Return a dataclass filled from plain values and defaults; on a bad value, append to `problems` and return None.

    path: path of the values, for messages. opened: classes of the fields that other parts fill. offer: the part that
    has the options, if any.
    """
    if isinstance(values, cls):
        return values
    if values is not None and not isinstance(values, Mapping):
        problems.append(Problem(f"{path}: expected options, got {values!r}."))
        return None
    values, types, before, opened = dict(values or {}), resolve_hints(cls), len(problems), opened or {}
    owner = f"{offer.group}={offer.part.name}" if offer else path
    option_names = list(get_defaults(cls))
    for key in [key for key in values if key not in option_names]:
        listing = f"Options: {', '.join(option_names)}." if option_names else f"{owner} has no options."
        there, synonyms = [f"{path}.{name}" for name in option_names], installed().get_synonyms()
        guess = answer(f"{path}.{key}", str(values[key]), installed().get_words())
        guess = guess or suggest_synonym(f"{path}.{key}", there, synonyms) or suggest_near(str(key), option_names)
        problems.append(Problem(f"{path}.{key}: {owner} has no such option.", guess, listing))
        del values[key]
    arguments = {}
    for key in option_names:
        where, hint = f"{path}.{key}", types[key]
        inner = opened.get(key) or (hint if isinstance(hint, type) and is_dataclass(hint) else None)
        if values.get(key, get_defaults(cls)[key]) == REQUIRED:
            problems.append(Problem(f"{where} is required.", f"Expected {describe(hint)}; there is no default."))
        elif inner is not None and (key in values or key in opened):
            options, stands = values.get(key), get_defaults(cls)[key]
            if key in opened:
                options, stands = {} if options is None else options, get_opened_defaults(cls, key, inner)
            if isinstance(options, Mapping) and isinstance(stands, Mapping):
                options = {**stands, **options}  # the field's own default may differ from that of its class
            arguments[key] = fill(inner, options, where, problems)
        elif key in values:
            try:
                arguments[key] = convert(hint, values[key])
            except InvalidValue as error:
                guess = suggest_near(str(values[key]), list_choices(hint))
                problems.append(Problem(f"{where}={spell(values[key])}: {error}.", guess))
    if len(problems) > before:
        return None
    try:
        return cls(**arguments)
    except (ValueError, UserError) as error:  # a class may refuse its values in __post_init__
        problems.append(Problem(f"{path}: {error}"))
        return None


def _expand(value: Any, path: str, references: dict[str, str]) -> Any:
    """Return a value with environment references replaced; store each reference by its path in `references`."""
    if isinstance(value, Mapping):
        return {key: _expand(item, f"{path}.{key}".lstrip("."), references) for key, item in value.items()}
    if not isinstance(value, str) or not ENVIRONMENT.search(value):
        return value
    references[path] = value

    def look_up(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in os.environ or default is not None:
            return os.environ.get(name, (default or "").strip())
        raise UserError(
            f"{path}={value} needs the environment variable {name}, which is not set.", f"export {name}=...", ""
        )

    return ENVIRONMENT.sub(look_up, value)
