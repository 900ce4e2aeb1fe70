"""Write the pages of options: a page for each group of parts, and one with the options of every run."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

from mdtext import anchor, cell, sentence

from gangline.config.defaults import get_default_choices
from gangline.config.fields import Option, iterate_options
from gangline.config.sections import SECTIONS
from gangline.config.values import describe
from gangline.plugin.hooks import BY_GROUP, LISTS
from gangline.plugin.registry import Offer, installed

ROOT = Path(__file__).parent.parent
OURS = {tomllib.loads(path.read_text())["project"]["name"] for path in ROOT.glob("packages/*/pyproject.toml")}

TOP = """\
# Options

Every option of every part that the packages of this repository offer. `train group=name` chooses a part, and
`train group.option=value` sets an option. `train group=name --help` prints the same in a terminal, third-party plugins
included. A part that builds on another lists only what differs. [Names of other frameworks](migrate/names.md) for these
options have their own table.

| group | parts | default |
|---|---|---|
"""


def pages() -> dict[str, str]:
    """Return file name below docs/ -> text: the list of groups with the options of every run, and a page per group."""
    groups = ours()
    index = [TOP.rstrip("\n")]
    for group, offers in groups.items():
        parts = ", ".join(f"`{offer.part.name}`" for offer in sorted(offers, key=lambda offer: offer.part.name))
        index.append(f"| [`{group}`]({_get_file(group)}) | {parts} | {_describe_default(group)} |")
    index += ["", "## Every run", ""]
    for name, section in SECTIONS.items():
        index += [f"### {name}", "", inspect.getdoc(section) or "", "", *_table(iterate_options(section, name)), ""]
    return {"options.md": "\n".join(index)} | {
        _get_file(group): "\n".join(_write_group(group, offers)) for group, offers in groups.items()
    }


def _get_file(group: str) -> str:
    return f"options/{group.replace('/', '-')}.md"


def _write_group(group: str, offers: list[Offer]) -> Iterator[str]:
    yield from (f"# Options of {group}", "", _about(group) + " [All groups](../options.md)", "")
    for offer in offers:
        yield from (*_part(offer, offers), "")


def _describe_default(group: str) -> str:
    outer, _, field = group.rpartition("/")
    if group in LISTS:
        return f"`[{','.join(get_default_choices().get(group) or [])}]`"
    if outer:  # the part that opens the group determines the default; parts of one outer group may differ
        named = {
            offer.part.opens[field] for offer in installed().get_offers(outer).values() if field in offer.part.opens
        }
        return ", ".join(f"`{name or 'off'}`" for name in sorted(named))
    if _is_read_by_commands(group):
        return "chosen by a command"
    return f"`{get_default_choices().get(group) or 'off'}`"


def _is_read_by_commands(group: str) -> bool:
    return group in BY_GROUP and BY_GROUP[group].chosen == "by command"


def ours() -> dict[str, list[Offer]]:
    """Return the parts of this repository's packages, by group. All packages must be installed."""
    found = installed()
    offers = [
        offer
        for group in found.list_groups()
        for offer in found.get_offers(group).values()
        if offer.distribution in OURS
    ]
    missing = OURS - {distribution.name for distribution in distributions()}  # a package may have only commands
    if missing:
        raise SystemExit(f"not installed: {', '.join(sorted(missing))}; the page is of all packages together")
    offers.sort(key=lambda offer: len(offer.part.config.__mro__))  # base classes first
    return {
        group: mine for group in found.list_groups() if (mine := [offer for offer in offers if offer.group == group])
    }


def _about(group: str) -> str:
    usual = _describe_default(group)
    if group in LISTS:
        return f"A list, by default {usual}; options are set as `{group}.<name>.<option>`."
    if _is_read_by_commands(group):
        return "Read by commands of `gangline`, and by no run."
    return f"By default: {usual}."


def _part(offer: Offer, others: Iterable[Offer]) -> Iterator[str]:
    part = offer.part
    supplier = "" if offer.distribution == "gangline-core" else f" From `{offer.distribution}`."
    depends = f" Depends on the layout: {part.layout_dependent}" if part.layout_dependent else ""
    yield from (f"## {offer.group}={part.name}", "", sentence(part.summary) + supplier + depends, "")
    place = f"{offer.group}.{part.name}" if offer.group in LISTS else offer.group
    own = list(iterate_options(part.config, place))
    base = base_of(offer, others)
    if base is not None:
        known = {option.path: option.default for option in iterate_options(base.part.config, place)}
        own = [option for option in own if known.get(option.path, ...) != option.default]
        heading = f"{base.group}={base.part.name}"
        yield from (f"The options of [`{heading}`](#{anchor(heading)})" + (", with" if own else "."), "")
    elif not own:
        yield "No options."
    if own:
        yield from _table(own)


def base_of(offer: Offer, others: Iterable[Offer]) -> Offer | None:
    """Return the nearest part whose configuration this part's derives from, else the first part with equal options.

    others: all parts of the group, in the order of the page
    """
    by_class = {other.part.config: other for other in others if other is not offer}
    derived = next((by_class[cls] for cls in offer.part.config.__mro__[1:] if cls in by_class), None)
    if derived is not None:
        return derived
    described = _describe(offer)
    alike = next(other for other in others if _describe(other) == described)
    return alike if described and alike is not offer else None


def _describe(offer: Offer) -> list[tuple[str, object, str]]:
    return [(option.path, option.hint, option.comment) for option in iterate_options(offer.part.config, offer.group)]


def _table(found: Iterable[Option]) -> Iterator[str]:
    yield "| option | type | default | |"
    yield "|---|---|---|---|"
    for option in found:
        default = f"`{_value(option.default)}`"
        yield f"| `{option.path}` | {describe(option.hint)} | {default} | {cell(option.help)} |"


def _value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return str(value)
