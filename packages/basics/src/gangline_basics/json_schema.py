"""JSON Schema of a configuration, for editors: `gangline schema`, with every section, group, installed part and option.

The schema describes config.yaml and recipes, which omit most options, so it requires no option. Torch-free.
"""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf

from gangline.cli import make_notes
from gangline.config.defaults import get_default_choices
from gangline.config.fields import REQUIRED, Option, iterate_options
from gangline.config.ranges import OneOf, get_bound, list_conditions
from gangline.config.sections import SECTIONS
from gangline.config.values import list_alternatives
from gangline.errors import UserError
from gangline.plugin.discovery import Offer
from gangline.plugin.hooks import BY_GROUP, GROUPS, LISTS
from gangline.plugin.registry import OFF, installed

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}
_KEYWORDS = {Ge: "minimum", Gt: "exclusiveMinimum", Le: "maximum", Lt: "exclusiveMaximum", MultipleOf: "multipleOf"}
_REFERENCE = {"type": "string", "pattern": r"\$\{"}  # interpolation of another option or of an environment variable


def main(argv: Sequence[str]) -> int:
    """Print the schema."""
    about = "Print the JSON Schema of config.yaml and of recipes, with every installed part."
    argparse.ArgumentParser(prog="gangline schema", description=about).parse_args(list(argv))
    print(json.dumps(run_schema(make_notes("gangline schema")), ensure_ascii=False, allow_nan=False))
    return 0


def run_schema(note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of every run that can be composed here, third-party parts included.

    note: function called with a line for each part that is omitted because a type of its options is not supported.
    """
    registry, parts, definitions = installed(), {}, {}
    sections = {name: _make_object(iterate_options(section, name), name) for name, section in SECTIONS.items()}
    rules: list[dict[str, Any]] = []
    for group in registry.list_groups():
        offers = registry.get_offers(group)
        if not offers or (group in BY_GROUP and group not in GROUPS):
            continue
        for name, offer in list(offers.items()):
            try:
                schema = _make_object(iterate_options(offer.part.config, group), group)
            except UserError as error:
                note(f"the schema omits {group}={name} of {offer.supplier}: {error}")
                del offers[name]
                continue
            schema["properties"] |= {name: {"type": ["object", "null"]} for name in offer.part.opens}
            definitions[_name_definition(group, name)] = {"description": offer.part.summary, **schema}
        names = [name for name in registry.find_choices(group) if name in offers or name == OFF]
        if group in LISTS:
            parts[group] = {"type": "array", "items": {"enum": names}}
            sections[group] = _make_sections({name: _make_reference(group, name) for name in names})
        else:
            parts[group] = {"enum": _list_switches(names)}
            sections |= {} if "/" in group else {group: {"type": ["object", "null"]}}
            rules += _iterate_rules(group, offers)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of a gangline run",
        **_make_sections({"parts": _make_sections(parts), **sections}),
        "allOf": rules,
        "$defs": definitions,
    }


def _iterate_rules(group: str, offers: Mapping[str, Offer]) -> Iterator[dict[str, Any]]:
    """Yield rules for the options of a group, and of the groups inside it that its parts open.

    A group accepts the options of its chosen part, or without a choice those of its default part. A recipe may leave
    the choice for a plugin's group to the command line; the group then accepts the options of any of its parts.
    """
    for name, offer in offers.items():
        choice = {group: {"enum": _list_switches([name])}}
        required_groups = [] if get_default_choices().get(group) == name else [group]
        yield _make_rule(group, choice, _make_reference(group, name), required_groups)
        for inner, default in offer.part.opens.items():
            place = f"{group}/{inner}"
            if default in installed().get_offers(place):
                yield _make_rule(place, {**choice, place: False}, _make_reference(place, default), required_groups)
        if group == "data":
            yield _make_rule(
                "validate/sets", choice, {"additionalProperties": _make_reference(group, name)}, required_groups
            )
    outer = group.partition("/")[0]
    if outer not in GROUPS:
        any_part = {"anyOf": [_make_reference(group, name) for name in offers]}
        yield _make_rule(group, {outer: False, group: False}, any_part)


def _make_rule(
    place: str, parts: Mapping[str, Any], then: Mapping[str, Any], needed: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a JSON Schema if/then rule: `place` must match `then` if choices match `parts` and `needed` are set."""
    part_schema: dict[str, Any] = {"properties": parts}
    condition: dict[str, Any] = {"properties": {"parts": part_schema}}
    if needed:
        part_schema |= {"type": "object", "required": needed}
        condition["required"] = ["parts"]
    for step in reversed(place.split("/")):
        then = {"properties": {step: then}}
    return {"if": condition, "then": then}


def _list_switches(names: list[str]) -> list[Any]:
    """Return the names of parts, and true for "on" and false for "off", because YAML 1.1 reads them as booleans."""
    return [*names, *(value for word, value in (("on", True), (OFF, False)) if word in names)]


def _name_definition(group: str, name: str) -> str:
    return f"{group.replace('/', '.')}={name}"


def _make_reference(group: str, name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{_name_definition(group, name)}"}


def _make_sections(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _make_object(found: Iterable[Option], prefix: str) -> dict[str, Any]:
    """Return the schema of options; nested dataclasses become nested objects."""
    schema = _make_sections({})
    for option in found:
        *way, last = option.path.removeprefix(f"{prefix}.").split(".")
        place = schema
        for name in way:
            place = place["properties"].setdefault(name, _make_sections({}))
        place["properties"][last] = _make_option(option)
    return schema


def _make_option(option: Option) -> dict[str, Any]:
    schema = _join_branches([*_iterate_branches(option.stated), _REFERENCE])
    schema |= {"description": option.help} if option.help else {}
    return {**schema, "default": option.default} if _is_json(option.default) else schema


def _is_json(default: Any) -> bool:
    """Return whether JSON can represent a default: no infinity, no value of another type, and not REQUIRED."""
    try:
        json.dumps(default, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return default != REQUIRED


def _join_branches(branches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a value that matches one of the branches."""
    plain = any(branch == {"type": "string"} or not branch for branch in branches)
    schemas = [branch for branch in branches if branch is not _REFERENCE or not plain]
    return dict(schemas[0]) if len(schemas) == 1 else {"anyOf": schemas}


def _iterate_branches(hint: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema of each type that a value may have."""
    kind, args = get_origin(hint), get_args(hint)
    if len(members := list_alternatives(hint)) > 1:
        for member in members:
            yield from _iterate_branches(member)
    elif kind is Annotated:
        enums = [list(get_bound(item)) for item in list_conditions(hint) if isinstance(item, OneOf)]
        limits = {_KEYWORDS[type(item)]: get_bound(item) for item in list_conditions(hint) if type(item) in _KEYWORDS}
        yield from ({"enum": enums[0]} if enums else {**branch, **limits} for branch in _iterate_branches(args[0]))
    elif kind is Literal:
        yield {"enum": list(args)}
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield {"enum": [member.value for member in hint]}
    elif (kind or hint) in (list, tuple, set, frozenset):
        yield {"type": "array", **_make_items(args)}
    elif (kind or hint) is dict:
        yield {"type": "object", "additionalProperties": _join_branches([*_iterate_branches(args[1] if args else Any)])}
    else:
        yield {"type": _TYPES[hint]} if hint in _TYPES else {}


def _make_items(args: tuple[Any, ...]) -> dict[str, Any]:
    inner = [_join_branches([*_iterate_branches(arg)]) for arg in args if arg is not Ellipsis]
    if len(inner) < 2:
        return {"items": inner[0]} if inner else {}
    return {"prefixItems": inner, "minItems": len(inner), "maxItems": len(inner)}
