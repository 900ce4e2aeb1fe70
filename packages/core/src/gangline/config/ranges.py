"""What values an option may have, stated beside its type. Torch-free.

    from gangline.config.ranges import AtLeast, LessThan, PositiveInt

    steps: PositiveInt = 300  # optimizer steps
    momentum: Annotated[float, AtLeast(0), LessThan(1)] = 0.95  # decay of the mean gradient
    order: Literal["once", "again"] = "once"  # whether samples come back

The check of a run, `--help`, completion and the page of the options read them from there. A number is finite unless
it says otherwise. What depends on other options is a matter of the part's own `check`, which comes after these.
"""

from __future__ import annotations

import math
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin


class Range(ABC):
    """A condition on one value; its text follows "must be"."""

    @abstractmethod
    def fits(self, value: Any) -> bool:
        """Whether the value has a meaning; it is of the field's type, and never None."""

    @abstractmethod
    def __str__(self) -> str: ...


def _digits(number: float) -> str:
    """Return a number as people type it: 1000000, where `:g` would round it to 1e+06."""
    return str(number) if isinstance(number, int) else f"{number:.15g}"


@dataclass(frozen=True)
class AtLeast(Range):
    """value >= number"""

    number: float

    def fits(self, value: Any) -> bool:
        return value >= self.number

    def __str__(self) -> str:
        return f"at least {_digits(self.number)}"


@dataclass(frozen=True)
class MoreThan(Range):
    """value > number"""

    number: float

    def fits(self, value: Any) -> bool:
        return value > self.number

    def __str__(self) -> str:
        return f"more than {_digits(self.number)}"


@dataclass(frozen=True)
class AtMost(Range):
    """value <= number"""

    number: float

    def fits(self, value: Any) -> bool:
        return value <= self.number

    def __str__(self) -> str:
        return f"at most {_digits(self.number)}"


@dataclass(frozen=True)
class LessThan(Range):
    """value < number"""

    number: float

    def fits(self, value: Any) -> bool:
        return value < self.number

    def __str__(self) -> str:
        return f"less than {_digits(self.number)}"


@dataclass(frozen=True)
class OneOf(Range):
    """One of some words that are known when the module is imported; Literal where they can be written down."""

    words: Collection[str]

    def fits(self, value: Any) -> bool:
        return value in self.words

    def __str__(self) -> str:
        return f"one of {', '.join(map(str, self.words))}"


@dataclass(frozen=True)
class Printable(Range):
    """Text of one line without control characters."""

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and value.isprintable()

    def __str__(self) -> str:
        return "printable text in one line"


@dataclass(frozen=True)
class AnyNumber(Range):
    """Every finite number is valid: said of a field, so that its range is not forgotten."""

    def fits(self, value: Any) -> bool:
        return True

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class OrInfinite(Range):
    """Beside other ranges: infinity has a meaning too."""

    def fits(self, value: Any) -> bool:
        return not math.isnan(value)

    def __str__(self) -> str:
        return "or inf"


def _nothing(value: Any) -> bool:
    return False


@dataclass(frozen=True)
class RunsCode:
    """Marks an option whose value runs as a program: ``setup: Annotated[list[str], RunsCode()]``.

    Only the command line may set it: see `gangline.config.programs`. `data` says which values are data after all, such
    as a URL in place of a command.
    """

    data: Callable[[Any], bool] = _nothing


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, MoreThan(0)]
NonNegativeFloat = Annotated[float, AtLeast(0)]
Share = Annotated[float, AtLeast(0), AtMost(1)]
ShareBelowOne = Annotated[float, AtLeast(0), LessThan(1)]


def wrong(hint: Any, value: Any) -> str | None:
    """What a value has to be and is not, as in "must be at least 1"; None where it has a meaning.

    hint: a type with its metadata (`gangline.config.fields.stated`). Whether a value is of its type is not asked here.
    """
    if value is None:
        return None
    kind, args = get_origin(hint), get_args(hint)
    if kind is Annotated:
        ranges = [item for item in args[1:] if isinstance(item, Range)] if _holds(args[0], value) else []
        if _infinite(value) and not any(isinstance(item, OrInfinite) for item in ranges):
            return f"must be {' and '.join(filter(None, ('finite', _shown(ranges))))}"
        if not all(item.fits(value) for item in ranges):
            return f"must be {_shown(ranges)}"
        return None if _number(value) and ranges else wrong(args[0], value)
    if kind in (Union, types.UnionType):
        return next((wrong(member, value) for member in args if _holds(member, value)), None)
    if kind is Literal:
        return None if value in args else f"must be one of {', '.join(map(str, args))}"
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        return _wrong_inside(kind, args, value)
    return "must be finite" if kind is None and _infinite(value) else None


def unfit(hint: Any, value: Any) -> str | None:
    """As `wrong`, for a value of any type that a file holds: also say which type it has to be of.

    A whole number beyond 64 bits is refused: it is larger than any size, and has no float.
    """
    if not _is_of(hint, value):
        return f"must be {', '.join(filter(None, (_type_words(hint), words(hint))))}"
    return "must be less than 2^63" if _beyond_64_bits(value) else wrong(hint, value)


def _is_of(hint: Any, value: Any) -> bool:
    """Whether a JSON value has a type: a boolean is not a number, and an integer is also a float."""
    kind, args = get_origin(hint), get_args(hint)
    if hint is Any or kind is Literal:
        return hint is Any or value in args
    if kind is Annotated:
        return _is_of(args[0], value)
    if kind in (Union, types.UnionType):
        return any(_is_of(arg, value) for arg in args)
    if kind is list:
        return isinstance(value, list) and all(_is_of(args[0], item) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


def _type_words(hint: Any) -> str:
    kind, args = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _type_words(args[0])
    if kind in (Union, types.UnionType):
        return " or ".join(map(_type_words, args))
    named = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
    return {**named, dict: "an object", types.NoneType: "null"}.get(kind or hint, str(hint))


def _beyond_64_bits(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_beyond_64_bits, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _wrong_inside(kind: Any, args: tuple[Any, ...], value: Collection[Any] | Mapping[Any, Any]) -> str | None:
    """As `wrong`, of what a list or a mapping holds."""
    items = list(value.values() if isinstance(value, Mapping) else value)
    if kind is tuple and Ellipsis not in args:
        if len(items) != len(args):
            return f"must be {len(args)} values"
        hints = list(args)
    else:
        hints = [arg for arg in args if arg is not Ellipsis][-1:] * len(items)
    complaints = (wrong(hint, item) for hint, item in zip(hints, items, strict=False))
    return next((complaint.replace("must be", "must each be") for complaint in complaints if complaint), None)


def words(hint: Any) -> str:
    """The range of a type, as in "at least 1", or "" where it states none."""
    kind, args = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _shown([item for item in args[1:] if isinstance(item, Range)]) or words(args[0])
    if kind is Literal:
        return ""  # the type itself says it
    found = list(dict.fromkeys(filter(None, map(words, args))))
    return f"each {found[0]}" if found and kind in (list, tuple, set, frozenset) else " or ".join(found)


def choices(hint: Any) -> list[str]:
    """The words of a type that has few, as a user types them."""
    kind, args = get_origin(hint), get_args(hint)
    if kind is Annotated:
        listed = [str(word) for item in args[1:] if isinstance(item, OneOf) for word in item.words]
        return listed or choices(args[0])
    if kind is Literal:
        return [str(word) for word in args]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(member.value) for member in hint]
    return [word for arg in args for word in choices(arg)] if kind in (Union, types.UnionType) else []


def runs_code(hint: Any, value: Any = None) -> bool:
    """Whether an option of this type runs its value as a program; with a value, whether it runs this one."""
    markers = [item for item in get_args(hint) if isinstance(item, RunsCode)] if get_origin(hint) is Annotated else []
    return any(value is None or (bool(value) and not marker.data(value)) for marker in markers)


def states_all(hint: Any) -> bool:
    """Whether every number in a type has a range."""
    if get_origin(hint) is Annotated:
        return any(isinstance(item, Range) for item in get_args(hint)[1:]) or states_all(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return True
    return hint not in (int, float) and all(map(states_all, get_args(hint)))


def _shown(ranges: Collection[Range]) -> str:
    conditions = " and ".join(filter(None, (str(item) for item in ranges if not isinstance(item, OrInfinite))))
    return f"{conditions}, or inf" if any(isinstance(item, OrInfinite) for item in ranges) else conditions


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)  # a whole number may be too large for a float


def _holds(hint: Any, value: Any) -> bool:
    """Whether a value is of a type, or of a member of it; a whole number is of float as well."""
    kind, args = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _holds(args[0], value)
    if kind in (Union, types.UnionType):
        return any(_holds(arg, value) for arg in args)
    if kind is Literal:
        return value in args
    if _number(value):
        return hint is float or hint is type(value)
    held = kind or hint
    if held in (list, tuple):
        return isinstance(value, list | tuple)
    return isinstance(held, type) and isinstance(value, held)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending: what a size that must divide it may be."""
    low = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*low, *(number // value for value in low)})


def listed_divisors(number: int) -> str:
    """`divisors` as a message names them: "1, 2, 4"."""
    return ", ".join(map(str, divisors(number)))
