"""Ranges of option values, stated in the type with `annotated-types`. Torch-free.

    from annotated_types import Ge, Lt

    from gangline.config import PositiveInt

    steps: PositiveInt = 300  # optimizer steps
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95  # decay of the mean gradient
    order: Literal["once", "again"] = "once"  # whether samples repeat

The check of a run, `--help`, completion, the JSON Schema and docs/options.md read the range from the type. A number
must be finite unless its type is `IsNotNan`. Conditions on several options belong in the part's own `check`, which
runs after the check of ranges.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import (
    BaseMetadata,
    Ge,
    GroupedMetadata,
    Gt,
    IsNotNan,
    Le,
    Lt,
    MaxLen,
    MinLen,
    MultipleOf,
    Predicate,
)

from gangline.config.values import list_alternatives


@dataclass(frozen=True)
class OneOf(BaseMetadata):
    """Marks an option whose value is one of `words`, known at import; use Literal if the source code can list them."""

    words: Collection[str]


def _is_nothing(value: Any) -> bool:
    return False


@dataclass(frozen=True)
class RunsCode:
    """Marks an option whose value runs as a program: ``setup: Annotated[list[str], RunsCode()]``.

    Only the command line may set it: see `gangline.config.programs`. `data` returns whether a value is only data, such
    as a URL in place of a command.
    """

    data: Callable[[Any], bool] = _is_nothing


PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
ShareBelowOne = Annotated[float, Ge(0), Lt(1)]

# Kind of condition -> (whether a value fits its bound, the text after "must be").
_BOUNDS: dict[type, tuple[Callable[[Any, Any], bool], str]] = {
    Ge: (operator.ge, "at least {}"),
    Gt: (operator.gt, "more than {}"),
    Le: (operator.le, "at most {}"),
    Lt: (operator.lt, "less than {}"),
    MultipleOf: (lambda value, number: value % number == 0, "a multiple of {}"),
    MinLen: (lambda value, length: len(value) >= length, "at least {} long"),
    MaxLen: (lambda value, length: len(value) <= length, "at most {} long"),
    OneOf: (lambda value, words: value in words, "one of {}"),
}
_PREDICATES = ((str.isprintable, "printable text in one line"), (math.isfinite, ""))  # no text: every number is finite
_OR_INFINITE = get_args(IsNotNan[float])[1]


def list_conditions(hint: Any) -> list[Any]:
    """Return the conditions in an `Annotated` type, with `Interval` and `Len` as their bounds; else []."""
    return list(_ungroup(get_args(hint)[1:])) if get_origin(hint) is Annotated else []


def _ungroup(metadata: Collection[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, GroupedMetadata):
            yield from _ungroup(list(item))
        elif isinstance(item, Predicate) or type(item) in _BOUNDS:
            yield item


def get_bound(condition: Any) -> Any:
    """Return the number, length or words that a condition compares with."""
    return getattr(condition, fields(condition)[0].name)


def _fits(condition: Any, value: Any) -> bool:
    if isinstance(condition, Predicate):
        return condition.func is math.isfinite or bool(condition.func(value))
    return _BOUNDS[type(condition)][0](value, get_bound(condition))


def explain_wrong(hint: Any, value: Any) -> str | None:
    """Return the condition that a value violates, such as "must be at least 1"; None if the value is allowed.

    hint: a type with its metadata (`gangline.config.fields.resolve_hints_with_ranges`). The value must already have
    this type.
    """
    if value is None:
        return None
    kind, args = get_origin(hint), get_args(hint)
    if kind is Annotated:
        ranges = list_conditions(hint) if is_of(args[0], value) else []
        if _is_infinite(value) and _OR_INFINITE not in ranges:
            return f"must be {' and '.join(filter(None, ('finite', _show(ranges))))}"
        if not all(_fits(item, value) for item in ranges):
            return f"must be {_show(ranges)}"
        return None if _is_infinite(value) else explain_wrong(args[0], value)
    if len(members := list_alternatives(hint)) > 1:
        return next((explain_wrong(member, value) for member in members if is_of(member, value)), None)
    if kind is Literal:
        return None if value in args else f"must be one of {_spell(args)}"
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        return _explain_wrong_inside(kind, args, value)
    return "must be finite" if kind is None and _is_infinite(value) else None


def is_of(hint: Any, value: Any) -> bool:
    """Return whether a value has a type: a boolean is not a number, and an integer is also a float."""
    kind, args = get_origin(hint), get_args(hint)
    if hint is Any or kind is Literal:
        return hint is Any or value in args
    if kind is Annotated:
        return is_of(args[0], value)
    if len(members := list_alternatives(hint)) > 1:
        return any(is_of(member, value) for member in members)
    if isinstance(value, bool):
        return hint is bool
    if hint is float and isinstance(value, int):
        return True
    base_type = kind or hint
    if base_type in (list, tuple):
        inner = [arg for arg in args if arg is not Ellipsis] or [Any]
        return isinstance(value, list | tuple) and all(any(is_of(arg, item) for arg in inner) for item in value)
    return isinstance(base_type, type) and isinstance(value, base_type)


def _explain_wrong_inside(kind: Any, args: tuple[Any, ...], value: Collection[Any] | Mapping[Any, Any]) -> str | None:
    """Return the condition that an item of a list or mapping violates, as `explain_wrong` does; else None."""
    items = list(value.values() if isinstance(value, Mapping) else value)
    if kind is tuple and Ellipsis not in args:
        if len(items) != len(args):
            return f"must be {len(args)} values"
        hints = list(args)
    else:
        hints = [arg for arg in args if arg is not Ellipsis][-1:] * len(items)
    complaints = (explain_wrong(hint, item) for hint, item in zip(hints, items, strict=False))
    return next((complaint.replace("must be", "must each be") for complaint in complaints if complaint), None)


def format_range(hint: Any) -> str:
    """Return the range of a type as text, such as "at least 1"; "" if the type has no range."""
    kind, args = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _show(list_conditions(hint)) or format_range(args[0])
    if kind is Literal:
        return ""  # `list_choices` returns the values
    texts = list(dict.fromkeys(filter(None, map(format_range, args))))
    return f"each {texts[0]}" if texts and kind in (list, tuple, set, frozenset) else " or ".join(texts)


def list_choices(hint: Any) -> list[str]:
    """Return the values of a type that lists its values (Literal, Enum, `OneOf`), as a user types them; else []."""
    kind, args = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return [
            str(word) for item in list_conditions(hint) if isinstance(item, OneOf) for word in item.words
        ] or list_choices(args[0])
    if kind is Literal:
        return [str(word) for word in args]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(member.value) for member in hint]
    return [word for arg in list_alternatives(hint) if arg is not hint for word in list_choices(arg)]


def runs_code(hint: Any, value: Any = None) -> bool:
    """Return whether an option of this type runs its value as a program; with a value, whether it runs that value."""
    markers = [item for item in get_args(hint) if isinstance(item, RunsCode)] if get_origin(hint) is Annotated else []
    return any(value is None or (bool(value) and not marker.data(value)) for marker in markers)


def states_all(hint: Any) -> bool:
    """Return whether every number in a type has a range."""
    if get_origin(hint) is Annotated:
        return bool(list_conditions(hint)) or states_all(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return True
    return hint not in (int, float) and all(map(states_all, get_args(hint)))


def _show(ranges: Collection[Any]) -> str:
    text = " and ".join(filter(None, (_format_condition(item) for item in ranges if item != _OR_INFINITE)))
    return f"{text}, or inf" if _OR_INFINITE in ranges else text


def _format_condition(condition: Any) -> str:
    if isinstance(condition, Predicate):
        name = getattr(condition.func, "__name__", str(condition.func)).removeprefix("is").replace("_", " ").strip()
        return next((text for func, text in _PREDICATES if func is condition.func), name)
    return _BOUNDS[type(condition)][1].format(_spell(get_bound(condition)))


def _spell(value: Any) -> str:
    """Return words or a number as people type them: 1000000, where `:g` would round it to 1e+06."""
    if isinstance(value, float):
        return f"{value:.15g}"
    return ", ".join(map(str, value)) if isinstance(value, Collection) else str(value)


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)  # an integer may be too large for a float


def find_divisors(number: int) -> list[int]:
    """Return all divisors of a positive number in ascending order."""
    low = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*low, *(number // value for value in low)})


def list_divisors(number: int) -> str:
    """Return the divisors of a number as text for a message: "1, 2, 4"."""
    return ", ".join(map(str, find_divisors(number)))
