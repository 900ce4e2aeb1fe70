"""Options of a configuration class, with their types, defaults and comments. Torch-free."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from gangline.config.ranges import format_range, list_choices, runs_code
from gangline.config.values import to_plain
from gangline.errors import UserError

REQUIRED = "???"  # an option without a default, as OmegaConf writes it


@dataclass(frozen=True)
class Option:
    """One option as a user types it: ``path=value``."""

    path: str
    hint: Any
    default: Any  # default as plain data; REQUIRED if the option has no default
    owner: type  # dataclass that declares the field
    stated: Any  # type hint with the range (`gangline.config.ranges`)

    @property
    def comment(self) -> str:
        """Comment after the field in the source code, read from the source file on access; no run accesses it."""
        return read_comments(self.owner).get(self.path.rpartition(".")[2], "")

    @property
    def choices(self) -> list[str]:
        """Allowed values as a user types them, if the option's type lists its values; else []."""
        return list_choices(self.stated)

    @property
    def help(self) -> str:
        """Help text: the comment, and the choices or the range of the value."""
        alternatives = (
            [] if all(word in self.comment for word in self.choices) else [f"one of {', '.join(self.choices)}"]
        )
        alone = "only the command line can set a value that runs code" if runs_code(self.stated) else ""
        ranges = "; ".join(filter(None, [*alternatives, "" if self.choices else format_range(self.stated), alone]))
        return f"{self.comment} ({ranges})" if self.comment and ranges else self.comment or ranges


@cache
def resolve_hints(cls: type) -> dict[str, Any]:
    """Return field name -> resolved type. Raises UserError if a type is not importable at run time."""
    try:
        return get_type_hints(cls)
    except Exception as error:  # annotations of a plugin may raise anything
        hints = {name: hint for base in cls.__mro__ for name, hint in vars(base).get("__annotations__", {}).items()}
        fits = (name for name, hint in hints.items() if str(getattr(error, "name", "")) in str(hint))
        module, option = cls.__module__, next(fits, "")
        raise UserError(
            f"the type of the option {option} of {module}.{cls.__qualname__} cannot be resolved: {error}.",
            "The type of an option must be importable at run time, not only under TYPE_CHECKING.",
            f"Upgrade the package {module.partition('.')[0]}, which defines the option, or choose another part.",
        ) from error


def resolve_hints_with_ranges(cls: type) -> dict[str, Any]:
    """Return field name -> type with range. A field that changes only the default keeps its base class's range."""
    return _resolve_hints_with_ranges(cls)


@cache
def _resolve_hints_with_ranges(cls: type) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    bare: dict[str, Any] = {}
    resolve_hints(cls)  # raises UserError for a type that cannot be imported
    for base in reversed(cls.__mro__):
        full, stripped = get_type_hints(base, include_extras=True), get_type_hints(base)
        for name in vars(base).get("__annotations__", {}):
            if bare.get(name) != stripped[name] or full[name] != stripped[name]:
                hints[name], bare[name] = full[name], stripped[name]
    return hints


def get_defaults(cls: type) -> dict[str, Any]:
    """Return the plain default of every option of a configuration class; REQUIRED for an option without one."""
    defaults: dict[str, Any] = {}
    for item in fields(cls):
        if item.init:
            if item.default is not MISSING:
                defaults[item.name] = to_plain(item.default)
            else:
                defaults[item.name] = REQUIRED if item.default_factory is MISSING else to_plain(item.default_factory())
    return defaults


def get_opened_defaults(cls: type, name: str, chosen: type) -> dict[str, Any]:
    """Return the option defaults of field `name`: from the field's default if it is a `chosen`, else from `chosen`."""
    factory = next(item.default_factory for item in fields(cls) if item.name == name)
    own = None if factory is MISSING else factory()
    return to_plain(own) if type(own) is chosen else get_defaults(chosen)


def iterate_options(cls: type, prefix: str, opened: Mapping[str, type] | None = None) -> Iterator[Option]:
    """Yield the options of a class and its nested dataclasses; `opened` maps a field to the class that fills it.

    The defaults are the values in `cls()`: its values for a nested dataclass override the defaults of the nested class.
    """
    return _iterate_options(cls, prefix, opened or {}, get_defaults(cls))


def _iterate_options(cls: type, prefix: str, opened: Mapping[str, type], values: Mapping[str, Any]) -> Iterator[Option]:
    types, ranges = resolve_hints(cls), resolve_hints_with_ranges(cls)
    for name, value in values.items():
        part_class, declared = opened.get(name), _find_dataclass(types[name])
        if part_class is not None:
            yield from _iterate_options(part_class, f"{prefix}.{name}", {}, get_opened_defaults(cls, name, part_class))
        elif declared is not None:
            own, overrides = get_defaults(declared), value if isinstance(value, dict) else {}
            yield from _iterate_options(
                declared, f"{prefix}.{name}", {}, {each: overrides.get(each, own[each]) for each in own}
            )
        else:
            yield Option(f"{prefix}.{name}", types[name], value, cls, ranges[name])


def _find_dataclass(hint: Any) -> type | None:
    classes = [arg for arg in (hint, *get_args(hint)) if isinstance(arg, type) and is_dataclass(arg)]
    return classes[0] if len(classes) == 1 and not _is_container(hint) else None


def _is_container(hint: Any) -> bool:
    return getattr(hint, "__origin__", None) in (list, tuple, dict, set)


@cache
def read_comments(cls: type) -> dict[str, str]:
    """Return field or attribute -> its comment in the source code, base classes first; {} without source code.

    The comment is after the field or, if it is too long, in the lines above the field. If a subclass repeats a field of
    its base class, a comment above the repeated field explains only the new default, and is ignored.
    """
    field_comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue
        comments = {
            token.start[0]: token.string.lstrip("#").strip()
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        own_lines = {number for number, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("#")}
        for item in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                first, last = item.lineno, (item.end_lineno or item.lineno) + 1
                if not any(line in comments for line in range(first, last)):
                    last = first
                    if item.target.id in field_comments:
                        continue
                    while first - 1 in own_lines:
                        first -= 1
                if comment := " ".join(comments[line] for line in range(first, last) if line in comments):
                    field_comments[item.target.id] = comment
    return field_comments
