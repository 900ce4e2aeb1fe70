"""Write the page of hooks: each hook with its example, then the contracts of the parts."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
import typing
from abc import ABC
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mdtext import anchor, cell, code_cell, docstring_cell, paragraphs, prose

import gangline.config
import gangline_testkit
from gangline.comm.base import Comm, Pending
from gangline.comm.ordered import Later, sum_rows
from gangline.config.fields import read_comments
from gangline.config.ranges import format_range
from gangline.config.schema import PartConfig
from gangline.data.base import DataSource
from gangline.data.reader import BatchReader, ReadPlace, StoredBatch
from gangline.errors import Problem
from gangline.gradients import Bucket, BucketLayout, GradientReduction, GradientSlot
from gangline.plugin import registry
from gangline.plugin.hooks import HOOKS, Command, Hook, Kind
from gangline.plugin.parts import Part

TOP = """\
# Hooks

What a plugin can offer. A plugin is a Python module named by an entry point of the group `gangline.v1`; in it each hook
is a function of that name under `@hookimpl`. Hooks take no arguments and yield descriptions: a `Part`, a `Command` or a
`Kind`.
The [author's guide](plugins.md) starts with a complete plugin; this page lists every hook with one that works.

A part names its `build` as text, `"package.module:function"`, and a run imports it only when it has chosen the part.
The classes that authors implement are listed under [contracts](#contracts). A hook without a group of its own takes
parts of any group: each part names its group, and a new group is [opened](plugins-advanced.md#groups-of-your-own).
"""

BOLD = """\
A part must define the members in bold; the others have defaults. Of a dataclass such as `Bucket`, the fields in bold
are the required arguments.
"""

OPTIONS = """\
## Options

The bases of configurations, and what a part's configuration may answer: each member has a default. `run` is the
complete [run](glossary.md#a-run), a `gangline.config.Run`: `run.precision` is the configuration of the chosen
precision, and `gangline.plugin.registry.installed().find_part(run.precision).part.name` its name.
"""

RANGES = """\
### Ranges

`gangline.config` has short names for ranges that many options have. `annotated_types`, which comes with core, has the
others.
"""

SUITES = """\
## Suites

What `gangline_testkit` tests of a part, and what its author may claim in `can`
([how to use them](plugins.md#the-conformance-suite)).
"""


def page() -> str:
    """Return the text of docs/hooks.md."""
    found = [
        TOP,
        *_overview(),
        *map(_hook, HOOKS),
        _descriptor("Part", Part),
        _descriptor("Command", Command),
        _descriptor("Kind", Kind),
    ]
    classes = [_load(hook.contract) for hook in HOOKS if hook.contract]
    after = classes.index(GradientReduction) + 1
    # classes that a gradient reduction uses
    classes[after:after] = [Bucket, BucketLayout, GradientSlot, Comm, Pending, Later, sum_rows]
    after = classes.index(DataSource) + 1
    classes[after:after] = [BatchReader, ReadPlace, StoredBatch]  # classes that a source's `reader` uses
    found += ["## Contracts", "", BOLD, *map(_contract_of, classes)]
    bases = dict.fromkeys([PartConfig, *(hook.options for hook in HOOKS)])
    found += [OPTIONS, *map(_options_of, bases), _contract_of(Problem), *_ranges()]
    suites = [name for name in gangline_testkit.__all__ if name.endswith("Suite")]
    return "\n".join([*found, SUITES, *map(_suite, suites)])


def _load(name: str) -> type:
    """Return the class with the dotted name `name`."""
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(module), cls)


def _overview() -> Iterator[str]:
    """Yield the lines of the table of all hooks."""
    yield "| hook | group | yields | contract |"
    yield "|---|---|---|---|"
    for hook in HOOKS:
        group = f"`{hook.group}`" if hook.group else "its own" if hook.yields is Part else ""
        contract = _linked(hook) if hook.contract else ""
        yield f"| [`{hook.name}`](#{anchor(hook.name)}) | {group} | `{hook.yields.__name__}` | {contract} |"
    yield ""


def _hook(hook: Hook) -> str:
    """Return the section of a hook: its purpose, the contract of its parts, and the example plugin."""
    said, _, example = (inspect.getdoc(registry.load(hook.spec)) or "").partition("::\n")
    what, _, more = said.strip().partition("\n\n")
    rows = [f"## {hook.name}", "", prose(what), ""]
    if hook.yields is Part:
        name = hook.options.__name__
        rows += [f"Options derive from [`gangline.config.{name}`](#{anchor(name)}).", ""]
    if hook.contract:
        article = "an" if _linked(hook)[1] in "AEIOU" else "a"
        returns = f"`{hook.returns}`, see {_linked(hook)}" if hook.returns else f"{article} {_linked(hook)}"
        note = prose((inspect.getdoc(hook.options) or "").partition("\n\n")[0]).partition(". ")[2]
        rows[-2] += f" `build` gets `({hook.arguments})` and returns {returns}. {note}".rstrip()
    if more:
        rows += [prose(more), ""]
    return "\n".join([*rows, "```python", textwrap.dedent(example).strip("\n"), "```", ""])


def _linked(hook: Hook) -> str:
    """Return a link to the class that an author implements."""
    name = hook.contract.rpartition(".")[2]
    return f"[{name}](#{anchor(name)})"


def _contract_of(cls: type) -> str:
    """Return the section of a class that authors derive from, with its members, or of a function that authors call."""
    if inspect.isfunction(cls):
        return "\n".join([f"### {cls.__name__}", "", f"`{_public(cls)}{_signature(cls)}`", "", inspect.getdoc(cls), ""])
    rows = [f"### {cls.__name__}", "", f"`{_public(cls)}`", "", paragraphs(inspect.getdoc(cls) or ""), ""]
    return "\n".join([*rows, "| | |", "|---|---|", *_fields(cls), *_methods(cls), ""])


def _options_of(cls: type[PartConfig]) -> str:
    """Return the section of a group's base configuration: its members, and those of its other base classes."""
    bases = [base for base in cls.__mro__ if base is cls or not issubclass(PartConfig, base)]
    members = [row for base in bases if base is not ABC for row in (*_fields(base), *_methods(base, own=vars(cls)))]
    rows = [f"### {cls.__name__}", "", f"`{_public(cls)}`", "", paragraphs(inspect.getdoc(cls) or ""), ""]
    return "\n".join([*rows, *(["| | |", "|---|---|", *members, ""] if members else [])])


def _ranges() -> Iterator[str]:
    """Yield the lines of the table of value ranges: short name, allowed values."""
    yield RANGES
    yield "| `gangline.config` | |"
    yield "|---|---|"
    for name, hint in vars(gangline.config).items():
        if typing.get_origin(hint) is typing.Annotated:
            yield f"| `{name}` | `{typing.get_args(hint)[0].__name__}`, {format_range(hint)} |"
    yield ""


def _fields(cls: type) -> Iterator[str]:
    """Yield a table row for each public attribute that a class declares. Raises ValueError without a comment."""
    source = textwrap.dedent(inspect.getsource(cls))
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign) or (name := node.target.id).startswith("_"):
            continue
        mark = "" if node.value else "**"
        code = " ".join(ast.get_source_segment(source, node).split())
        shown = code_cell(re.sub(r"field\(default_factory=(\w+)\)", r"\1()", code))
        yield f"| {mark}{shown}{mark} | {cell(_text(cls, name, read_comments(cls).get(name)))} |"


def _text(cls: type, name: str, text: str | None) -> str:
    """Return the text of an attribute or method. Raises ValueError if it is missing."""
    if not text:
        raise ValueError(f"{cls.__qualname__}.{name} has no text: add a comment or a docstring in its source")
    return text


def _methods(cls: type, own: Mapping[str, object] = MappingProxyType({})) -> Iterator[str]:
    """Yield a table row for each method of a class. own: members of the derived class, which replace those of `cls`."""
    for name, member in vars(cls).items():
        if name in own and member is not own[name]:
            continue
        function = member.fget if isinstance(member, property) else member
        abstract = getattr(function, "__isabstractmethod__", False)
        if not callable(function) or (name.startswith("_") and not abstract):
            continue
        mark = "**" if abstract else ""
        shown = name if isinstance(member, property) else name + _signature(function)
        yield f"| {mark}{code_cell(shown)}{mark} | {docstring_cell(_text(cls, name, inspect.getdoc(function)))} |"


class _Code(str):
    """Text of an annotation or a default, which `inspect.signature` shows without further quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(function: object) -> str:
    """Return the parameters, without self, and the result of a function, with text defaults in double quotes."""
    signature = inspect.signature(function)
    kept = [
        parameter.replace(
            annotation=_as_code(parameter.annotation),
            default=_Code(f'"{parameter.default}"') if isinstance(parameter.default, str) else parameter.default,
        )
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    return str(signature.replace(parameters=kept, return_annotation=_as_code(signature.return_annotation)))


def _as_code(annotation: object) -> object:
    return _Code(annotation) if isinstance(annotation, str) else annotation


def _public(cls: type) -> str:
    """Return the dotted name by which authors import a class: in its package if that exports it, else in its module."""
    package = cls.__module__.rpartition(".")[0]
    module = package if hasattr(importlib.import_module(package), cls.__name__) else cls.__module__
    return f"{module}.{cls.__name__}"


def _descriptor(name: str, cls: type) -> str:
    """Return the section of a descriptor: a table of its fields and their comments."""
    comments = read_comments(cls)
    fields = [
        f"| `{field.name}` | {code_cell(str(field.type))} | {cell(_text(cls, field.name, comments.get(field.name)))} |"
        for field in dataclasses.fields(cls)
    ]
    rows = [f"## {name}", "", prose(inspect.getdoc(cls) or ""), "", "| field | type | |", "|---|---|---|"]
    return "\n".join([*rows, *fields, ""])


def _suite(name: str) -> str:
    """Return the section of a conformance suite, with the claims that a tested part can make."""
    suite = getattr(gangline_testkit, name)
    rows = [f"### {name}", "", paragraphs(inspect.getdoc(suite) or ""), ""]
    if suite.CLAIMS:
        rows += ["| claim | |", "|---|---|"]
        rows += [f"| `{claim}` | {cell(meaning)} |" for claim, meaning in suite.CLAIMS.items()] + [""]
    return "\n".join(rows)
