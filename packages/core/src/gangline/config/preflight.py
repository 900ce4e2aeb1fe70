"""Parser of command-line overrides; it refuses unknown groups, parts and options before Hydra sees them.

Hydra's own messages mention search paths and advise `+` for a missing group, which Hydra would accept and ignore. So
every override is compared with the installed parts and the catalogue, and Hydra gets only names that exist.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from gangline.config.defaults import get_default_choices
from gangline.config.known_options import LAYERS, KnownOptions
from gangline.config.suggest import suggest_near
from gangline.config.values import quote
from gangline.errors import UserError
from gangline.plugin.hooks import GROUPS, LISTS
from gangline.plugin.registry import OFF, Offer, installed

Choice = str | list[str]
_SWITCH = {True: "on", False: OFF}
_KEY = re.compile(r"[+~]{0,2}[\w./@:-]+")
_PIECES = re.compile(r"""\\.|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[][(){},:]|[^][(){},:"'\\]+|.""")


@dataclass
class Asked:
    """One requested run: the final choice in every group, and the values to set."""

    choices: dict[str, Choice]
    offers: dict[str, Offer]  # chosen parts by path of their options: "model", "track.jsonl", "lora", "lora.site"
    layers: list[dict[str, Any]] = field(default_factory=list)  # values of recipes and earlier runs; later layers win
    values: list[str] = field(default_factory=list)  # overrides for Hydra: "++key=value"


def parse(word: str) -> Override:
    """Parse one override by Hydra's grammar; a value with characters that the grammar reserves is read as text.

    Raises UserError for text that is not key=value, an unclosed bracket or quote, and a mapping with a key twice.
    """
    key, sign, value = (piece.strip() for piece in word.partition("="))
    if not _KEY.fullmatch(key) or not (sign or key.startswith("~")):
        raise UserError(f"cannot read {word!r}: expected key=value.", *_explain_no_key(key, sign, value))
    if value[:1] in ("[", "{", '"', "'") and (missing := find_unclosed(value)):
        raise UserError(
            f"cannot read {word!r}: the closing {missing} is missing.",
            "The shell removes quotes and splits at spaces. Quote the complete argument:  'track=[console, jsonl]'",
        )
    if twice := find_doubled_key(value):
        raise UserError(f"{word!r} has the key {twice!r} twice.", "Leave out one of the two values.")
    parser = OverridesParser.create()
    try:
        return parser.parse_override(f"{key}{sign}{value}")
    except HydraException:
        pass
    try:
        return parser.parse_override(f"{key}={quote(value)}")
    except HydraException as error:
        raise UserError(f"cannot read {word!r}.", f"To set text:  {shlex.quote(f'{key}={quote(value)}')}") from error


def _explain_no_key(key: str, sign: str, value: str) -> list[str]:
    """Return lines on how to fix an argument that does not begin with the name of an option."""
    together = "Write an option without spaces around =, as in  run.steps=10"
    if not key:
        return [together]
    if not sign:
        if key.endswith((".yaml", ".yml")):
            return [f"To use the file as a recipe:  train recipe={key}"]
        guess = "" if "." in key else suggest_near(key, [*installed().list_groups(), *LAYERS])
        return [guess or together, "Flags of train begin with -; to list them:  train --help"]
    return ["A key consists of names with dots between them, as in  optimizer.learning_rate=1e-3"]


def find_unclosed(text: str) -> str:
    """Return the closing quote or bracket that is missing at the end of a text; "" if all are closed."""
    open_now: list[str] = []
    for sign in re.sub(r"\\.", "", text):  # escaped quotes and brackets do not count
        if open_now and open_now[-1] in "\"'":
            if sign == open_now[-1]:
                open_now.pop()
        elif sign in "[{(":
            open_now.append({"[": "]", "{": "}", "(": ")"}[sign])
        elif sign in "\"'":
            open_now.append(sign)
        elif open_now and sign == open_now[-1]:
            open_now.pop()
    return open_now[-1] if open_now else ""


def find_doubled_key(text: str) -> str:
    """Return a key that one mapping in a value such as "{a: 1, b: {c: 2}}" has twice; "" if there is none."""
    open_now: list[set[str] | None] = []  # the keys of each open bracket; None: not a mapping
    key: list[str] | None = None  # pieces of the key that is being read
    before = ""
    for piece in _PIECES.findall(text):
        if piece in "{[(":
            mapping = piece == "{" and not before.endswith("$")  # ${...} is a reference
            open_now.append(set() if mapping else None)
            key = [] if mapping else None
        elif piece in "}])":
            del open_now[-1:]
            key = None
        elif piece == "," and open_now and open_now[-1] is not None:
            key = []
        elif piece == ":" and key and open_now and (keys := open_now[-1]) is not None:
            name = "".join(key).strip().strip("\"'")
            if name in keys:
                return name
            keys.add(name)
            key = None
        elif key is not None:
            key.append(piece)
        before = piece
    return ""


def sweep(words: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a multirun: one run per combination of values. Raises UserError."""
    spread = []
    for word in words:
        override = parse(word)
        if not override.is_sweep_override():
            spread.append([word])
            continue
        try:
            spread.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        except HydraException as error:
            raise UserError(f"cannot expand {word!r} into several runs: {' '.join(str(error).split())}.") from error
    return [list(combination) for combination in itertools.product(*spread)]


def read_request(words: Sequence[str], layers: Sequence[Mapping[str, Any]] = ()) -> Asked:
    """Return the run that the overrides request. Raises UserError that lists every unknown group, part and key."""
    installed().refuse_clashes()
    overrides = [parse(word) for word in words]
    for override in overrides:
        _refuse_grammar(override)
    groups = set(installed().list_groups())
    picks = [override for override in overrides if override.key_or_group in groups]
    choices, layers = _choose(picks, layers)
    missing: dict[str, UserError] = {}
    offers = _find_offers(choices, missing)
    errors = list(missing.values())
    known_options = KnownOptions(offers)
    values = []
    for override in overrides:
        path = override.key_or_group
        if path in groups or any(path.startswith(f"{place}.") for place in missing):  # cannot be checked
            continue
        try:
            values.append(known_options.format_setting(override))
        except UserError as error:
            errors.append(error)
    if errors:
        lines = (line.partition("is supplied by ")[2] for error in errors for line in error.details)
        packages = dict.fromkeys(filter(None, (line.partition(":  pip install ")[2] for line in lines)))
        if len(packages) > 1:
            install = f"To install all of them:  pip install {' '.join(packages)}"
            errors.append(UserError(f"{len(packages)} packages are missing.", install))
        raise UserError.of(error.to_problem() for error in errors)
    return Asked(choices, offers, layers, values)


def _refuse_grammar(override: Override) -> None:
    if override.is_sweep_override():
        word, value = override.input_line, override.get_key_element()
        raise UserError(
            f"{word} has several values.",
            f"To start a run for each value:  train -m {word}",
            f"To set a list:  {value}=[{str(word).partition('=')[2]}]",
        )
    if override.package is not None:
        raise UserError(f"{override.input_line}: '@' is not supported; write group=part or key=value.")
    if override.type == OverrideType.DEL and override.key_or_group not in installed().list_groups():
        raise UserError(f"{override.input_line}: '~' can remove only a group; set an option to null instead.")


def _choose(
    picks: Iterable[Override], layers: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Choice], list[dict[str, Any]]]:
    """Return the final choice in every group, and the layers without the options of replaced parts."""
    choices: dict[str, Choice] = dict(get_default_choices())
    before: list[dict[str, Choice]] = []
    for layer in layers:
        _replace(choices, {group: _parse_choice(group, value) for group, value in (layer.get("parts") or {}).items()})
        before.append(dict(choices))
    own_choices: dict[str, Choice] = {}
    for override in picks:
        group = override.key_or_group
        own_choices[group] = _parse_choice(
            group, OFF if override.type == OverrideType.DEL else override.value(), override
        )
    _replace(choices, own_choices)
    kept_layers = [_keep_chosen(layer, own, choices) for layer, own in zip(layers, before, strict=True)]
    return {group: choice for group, choice in choices.items() if group in GROUPS or choice != OFF}, kept_layers


def _replace(choices: dict[str, Choice], new: Mapping[str, Choice]) -> None:
    """Update `choices` by `new`, and delete the choices inside each part that is replaced."""
    for group, choice in new.items():
        if choices.get(group) != choice:
            for inner in [name for name in choices if name.startswith(f"{group}/")]:
                del choices[inner]
        choices[group] = choice
    choices.update(new)


def _parse_choice(group: str, value: Any, override: Override | None = None) -> Choice:
    """Return a choice as a name, or as a list of names for a list group; true and false mean on and off."""
    word = override.input_line if override else f"{group}={value}"
    if group in LISTS:
        names = value if isinstance(value, list) else [] if value in (None, False, OFF, "") else [value]
        names = ["on" if name is True else name for name in names]  # YAML reads health: [on] as [True]
        if not any(isinstance(name, list | dict | bool) or name is None for name in names):
            return list(dict.fromkeys(str(name) for name in names))
        raise UserError(f"{word}: expected names of parts, as in {group}=[a,b].", installed().list_choices(group))
    if isinstance(value, bool) or value is None:
        return _SWITCH[bool(value)]
    if isinstance(value, list | dict):
        raise UserError(
            f"{word}: a run has exactly one part of {group}; write {group}=<name>.", installed().list_choices(group)
        )
    if value == "":
        raise UserError(f"{group}= needs the name of a part.", installed().list_choices(group))
    return override.get_value_string() if override and not isinstance(value, str) else str(value)  # nan stays a name


def _keep_chosen(layer: Mapping[str, Any], own: Mapping[str, Choice], final: Mapping[str, Choice]) -> dict[str, Any]:
    """Return the values of a layer without the options of parts that the final choice replaces."""
    kept_layer: dict[str, Any] = {}
    for key, value in layer.items():
        if key == "parts":
            continue
        if key in LISTS:
            names = set(own.get(key, ())) - set(final.get(key, ()))
            kept_layer[key] = {name: options for name, options in (value or {}).items() if name not in names}
        elif own.get(key, OFF) == final.get(key, OFF):
            replaced = {name for name in value or {} if own.get(f"{key}/{name}") != final.get(f"{key}/{name}")}
            kept_layer[key] = {name: option for name, option in (value or {}).items() if name not in replaced}
    return kept_layer


def _find_offers(choices: dict[str, Choice], missing: dict[str, UserError]) -> dict[str, Offer]:
    """Return path of options -> chosen part; add to `choices` the default of each unset group inside a chosen part.

    `missing` receives the error of each choice that is not available, by path of its options.
    """
    offers: dict[str, Offer] = {}
    inner_groups: set[str] = set()
    for group, choice in [(group, choice) for group, choice in choices.items() if "/" not in group]:
        for name in choice if isinstance(choice, list) else [choice]:
            place = f"{group}.{name}" if group in LISTS else group
            try:
                offer = installed().find(group, name)
            except UserError as error:
                missing[place] = error
                continue
            offers[place] = offer
            for inner, default in offer.part.opens.items():
                inner_groups.add(f"{group}/{inner}")
                choices.setdefault(f"{group}/{inner}", default)
    for group in [group for group in choices if "/" in group]:
        place = group.replace("/", ".")
        try:
            if group not in inner_groups:
                parent, _, inner = group.partition("/")
                why = f"{parent}={choices[parent]} has no group {inner}" if parent in choices else f"{parent} is off"
                raise UserError(f"{group}={choices[group]}: {why}.", installed().list_choices(parent))
            offers[place] = installed().find(group, str(choices[group]))
        except UserError as error:
            missing[place] = error
    return offers
