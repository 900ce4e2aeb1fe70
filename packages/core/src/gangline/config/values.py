"""Conversion of option values: from plain values of YAML and the command line to types, and back. Torch-free.

`convert` raises InvalidValue; `gangline.config.serial.fill` collects these, so that a user sees every mistake at once.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}

_BARE = re.compile(r"(?!(?i:null|true|false|on|off|yes|no|nan|inf)$)(\.{0,2}/|[A-Za-z_])[\w./@%+-]*")  # unquoted item
_WORDS_ONLY = re.compile(rf"{_BARE.pattern}(:[\w./@%+:-]+| +[\w./@%+-]+)*")  # unquoted text outside a list
_REFERENCE = re.compile(r"\$\{oc\.env:\w+\}")

_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "text", dict: "a mapping", Any: "anything"}


class InvalidValue(ValueError):
    """Error for a value that an option cannot have; the message says which values it can have."""


def to_plain(value: Any) -> Any:
    """Convert dataclasses, enums, paths and tuples to dicts, strings and lists, which YAML and JSON can store."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value) if item.init}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    return value


def spell(value: Any) -> str:
    """Return a value as a user types it, such as "null" or "[1,2]"."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(spell, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def override(path: str, value: Any) -> str:
    """Return the override that sets `path` to `value`, in Hydra's grammar; a shell needs `shlex.quote` around it."""
    return f"{path}={_format_hydra(value, inside=False)}"


def _format_hydra(value: Any, inside: bool) -> str:
    """Return a value in Hydra's grammar, with quotes around text that Hydra would read as something else."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {_format_hydra(item, inside=True)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_format_hydra(item, inside=True) for item in value)}]"
    text = spell(value)
    if not isinstance(value, str) or _REFERENCE.fullmatch(text) or (_BARE if inside else _WORDS_ONLY).fullmatch(text):
        return text
    return quote(text)


def quote(text: str) -> str:
    """Return text in the double quotes of Hydra's grammar, where a backslash escapes only before a quote."""
    escaped = re.sub(r'(\\+)(?="|\Z)', r"\1\1", text).replace('"', '\\"')
    return f'"{escaped}"'


def list_alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; for any other type, a tuple of that type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def describe(hint: Any) -> str:
    """Return a type in a user's words, such as "a number or null"."""
    if hint is None or hint is type(None):
        return "null"
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe(args[0])
    if len(members := list_alternatives(hint)) > 1:
        return " or ".join(map(describe, members))
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(str(member.value) for member in hint)
    if origin in (list, tuple, set, frozenset):
        inner = [arg for arg in args if arg is not Ellipsis]
        count = f"{len(args)} " if origin is tuple and inner == list(args) else ""
        return "a list" + (f" of {count}{_convert_several(inner[0])}" if len(set(inner)) == 1 else "")
    return _NOUNS.get(origin or hint, getattr(hint, "__name__", str(hint)))


def _convert_several(hint: Any) -> str:
    """Return a type in a user's words, in the plural: "numbers"."""
    one = describe(hint)
    return f"{one.partition(' ')[2]}s" if one in (_NOUNS[int], _NOUNS[float], _NOUNS[dict]) else one


def convert(hint: Any, value: Any) -> Any:
    """Convert `value` to type `hint`. Raises InvalidValue. Numbers and booleans may be text, as on a command line."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if len(members := list_alternatives(hint)) > 1:
        return _convert_union(members, value, hint)
    if origin is Literal:
        return _convert_one_of({str(arg): arg for arg in args}, value, hint)
    if hint is None or hint is type(None):
        if value is None:
            return None
        raise InvalidValue(_explain_expected(hint, value))
    if not isinstance(origin or hint, type):
        return value
    return _convert_plain(origin or hint, args, value, hint)


def _convert_plain(cls: type, args: tuple[Any, ...], value: Any, hint: Any) -> Any:
    if issubclass(cls, Enum):
        spelled = {str(member.value): member for member in cls} | {member.name: member for member in cls}
        return value if isinstance(value, cls) else _convert_one_of(spelled, value, hint)
    if cls in (bool, int, float, str):
        return _convert_scalar(cls, value, hint)
    if issubclass(cls, PurePath) and isinstance(value, str):
        return cls(value)
    if cls in (list, tuple, set, frozenset) and isinstance(value, list | tuple | set):
        return _convert_sequence(cls, args, list(value), hint)
    if cls is dict and isinstance(value, Mapping):
        key, item = args or (Any, Any)
        return {convert(key, k): convert(item, v) for k, v in value.items()}
    if isinstance(value, cls):
        return value
    raise InvalidValue(_explain_expected(hint, value))


def _convert_scalar(cls: type, value: Any, hint: Any) -> Any:
    if type(value) is cls:
        return value
    if isinstance(value, bool) or value is None or isinstance(value, list | dict):
        raise InvalidValue(_explain_expected(hint, value))
    if cls is bool and isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if cls is str:
        return str(value)
    try:
        number = float(value)
    except ValueError:
        raise InvalidValue(_explain_expected(hint, value)) from None
    if cls is float:
        return number
    if cls is int and number.is_integer():  # 1e3 is an integer
        return int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
    raise InvalidValue(_explain_expected(hint, value))


def _convert_sequence(cls: type, args: tuple[Any, ...], value: list[Any], hint: Any) -> Any:
    if cls is tuple and args and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise InvalidValue(f"expected {len(args)} values, got {len(value)}")
        return tuple(convert(arg, item) for arg, item in zip(args, value, strict=True))
    inner = args[0] if args else Any
    return cls(convert(inner, item) for item in value)


def _convert_union(args: tuple[Any, ...], value: Any, hint: Any) -> Any:
    """Convert a value to the union member that is its own type, else to the first member that accepts it."""
    exact = [arg for arg in args if type(value) is (get_origin(arg) or arg)]
    for arg in [*exact, *(arg for arg in args if arg not in exact)]:
        try:
            return convert(arg, value)
        except InvalidValue:
            continue
    raise InvalidValue(_explain_expected(hint, value))


def _convert_one_of(spelled: Mapping[str, Any], value: Any, hint: Any) -> Any:
    """Return the entry of `spelled` for a value; a boolean also spells on, off, yes and no, as YAML reads them."""
    words = [str(value)] if not isinstance(value, bool) else [word for word, what in _WORDS.items() if what is value]
    for word in words:
        if word in spelled:
            return spelled[word]
    raise InvalidValue(_explain_expected(hint, value))


def _explain_expected(hint: Any, value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return f"expected {describe(hint)}, got {text}"
