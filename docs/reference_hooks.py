"""The page of the hooks: each with its example, then the contracts that what is built has to keep."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator

from mdtext import anchor, cell, code_cell, paragraphs, prose

import gangline_testkit
from gangline.comm.base import Comm
from gangline.comm.ordered import Later
from gangline.config.fields import comments_of
from gangline.config.schema import GROUPS, EditConfig
from gangline.data.base import DataSource
from gangline.data.reader import BatchReader, ReadPlace, StoredBatch
from gangline.gradients import Bucket, BucketLayout, GradientReduction, GradientSlot
from gangline.plugin import hooks, parts

TOP = """\
# Hooks

What a plugin can offer. A plugin is a Python module named by an entry point of the group `gangline.v1`; in it each hook
is a function of that name under `@hookimpl`. Hooks take no arguments and yield descriptions: a `Part`, or a `Command`.
The [author's guide](plugins.md) begins with a whole plugin; this page lists every hook with one that works.

A part's `build` is named as text, `"package.module:function"`, and imported only when a run has chosen the part. It is
called with the part's own configuration, then the run, then what the contract of its group adds. What it has to give
back is listed under [contracts](#contracts).
"""

SUITES = """\
## Suites

What `gangline_testkit` tests of a part, and what its author may claim in `can`
([how to use them](plugins.md#the-conformance-suite)).
"""


def page() -> str:
    """docs/hooks.md"""
    names = [name for name in vars(hooks) if name.startswith("gangline_")]
    found = [
        TOP,
        *map(_hook, names),
        _descriptor("Part", parts.Part),
        _descriptor("Command", hooks.Command),
        _descriptor("Kind", hooks.Kind),
    ]
    classes = [cls for base in GROUPS.values() if (cls := _built(base))]
    after = classes.index(GradientReduction) + 1
    classes[after:after] = [Bucket, BucketLayout, GradientSlot, Comm, Later]  # what a reduction works with
    after = classes.index(DataSource) + 1
    classes[after:after] = [BatchReader, ReadPlace, StoredBatch]  # what a source's `reader` is made of
    found += ["## Contracts", "", "Members in bold have to be written.", "", *map(_contract_of, classes)]
    suites = [name for name in gangline_testkit.__all__ if name.endswith("Suite")]
    return "\n".join([*found, SUITES, *map(_suite, suites)])


def _hook(name: str) -> str:
    said, _, example = (inspect.getdoc(getattr(hooks, name)) or "").partition("::\n")
    what, _, lead = said.strip().partition("\n\n")
    rows = [f"## {name}", "", prose(what), ""]
    group = hooks.GROUP_OF.get(name)
    if group:
        base = GROUPS[group]
        rows += [f"Configuration: derives from `gangline.config.{base.__name__}`.  ", f"Contract: {_linked(base)}", ""]
    if name == "gangline_parts":
        rows += [*_groups(), ""]
    if lead:
        rows += [prose(lead) + ":", ""]
    return "\n".join([*rows, "```python", textwrap.dedent(example).strip("\n"), "```", ""])


def _groups() -> Iterator[str]:
    """The groups that have no hook of their own."""
    yield "| group | configuration derives from | contract |"
    yield "|---|---|---|"
    others = {f"`{group}`": base for group, base in GROUPS.items() if group not in hooks.GROUP_OF.values()}
    for group, base in {**others, "of a model edit": EditConfig}.items():
        yield f"| {group} | `gangline.config.{base.__name__}` | {_linked(base)} |"
    yield "| any other | `gangline.config.PartConfig` | whoever opened the group says |"


def _contract(base: type) -> str:
    """The contract that a base class of configurations states, from its docstring."""
    text = prose(inspect.getdoc(base) or "")
    found = re.search(r"`[^`]*\(.*", text)
    return (found[0] if found else text).rstrip(".") + "."


def _linked(base: type) -> str:
    cls = _built(base)
    return _contract(base) + (f" See [{cls.__name__}](#{anchor(cls.__name__)})." if cls else "")


def _built(base: type) -> type | None:
    """The class that the contract of a group names as what its build gives."""
    found = re.search(r"-> (gangline\.[\w.]+)\.(\w+)`", _contract(base))
    return getattr(importlib.import_module(found[1]), found[2]) if found else None


def _contract_of(cls: type) -> str:
    """A class that authors derive from, and its members."""
    rows = [f"### {cls.__name__}", "", f"`{_public(cls)}`", "", paragraphs(inspect.getdoc(cls) or ""), ""]
    return "\n".join([*rows, "| | |", "|---|---|", *_fields(cls), *_methods(cls), ""])


def _fields(cls: type) -> Iterator[str]:
    """Attributes that are declared with a type; of those without a comment the class's own text speaks."""
    for found in re.finditer(r"^    (\w+: [^#\n]+?) +# (.+)$", inspect.getsource(cls), re.MULTILINE):
        mark = "" if "=" in found[1] else "**"
        yield f"| {mark}{code_cell(found[1])}{mark} | {cell(found[2])} |"


def _methods(cls: type) -> Iterator[str]:
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else member
        abstract = getattr(function, "__isabstractmethod__", False)
        if not callable(function) or (name.startswith("_") and not abstract):
            continue
        mark = "**" if abstract else ""
        shown = name if isinstance(member, property) else name + _signature(function)
        yield f"| {mark}{code_cell(shown)}{mark} | {cell(inspect.getdoc(function) or '')} |"


def _signature(function: object) -> str:
    signature = inspect.signature(function)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    return str(signature.replace(parameters=kept)).replace("'", "")


def _public(cls: type) -> str:
    """The name that an author imports a class by: that of its package, where the package has it."""
    package = cls.__module__.rpartition(".")[0]
    module = package if hasattr(importlib.import_module(package), cls.__name__) else cls.__module__
    return f"{module}.{cls.__name__}"


def _descriptor(name: str, cls: type) -> str:
    """A descriptor's fields with the comments behind them."""
    comments = comments_of(cls)
    fields = [
        f"| `{field.name}` | {code_cell(str(field.type))} | {cell(comments.get(field.name, ''))} |"
        for field in dataclasses.fields(cls)
    ]
    rows = [f"## {name}", "", prose(inspect.getdoc(cls) or ""), "", "| field | type | |", "|---|---|---|"]
    return "\n".join([*rows, *fields, ""])


def _suite(name: str) -> str:
    """A suite of the conformance kit, and what can be claimed of the parts that it tests."""
    suite = getattr(gangline_testkit, name)
    rows = [f"### {name}", "", paragraphs(inspect.getdoc(suite) or ""), ""]
    if suite.CLAIMS:
        rows += ["| claim | |", "|---|---|"]
        rows += [f"| `{claim}` | {cell(meaning)} |" for claim, meaning in suite.CLAIMS.items()] + [""]
    return "\n".join(rows)
