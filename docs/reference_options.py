"""The page of the options: every part of this repository's packages, and what can be set on it."""

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

Every part that the packages of this repository offer, and every option of it. `train group=name` chooses a part,
`train group.option=value` sets an option; `train group=name --help` prints the same on your terminal, plugins of others
included. A part that builds on another lists only what differs.

## Every run
"""


def page() -> str:
    """docs/options.md"""
    found = [TOP]
    for name, section in SECTIONS.items():
        found += [f"### {name}", "", inspect.getdoc(section) or "", "", *_table(iterate_options(section, name)), ""]
    for group, offers in ours().items():
        found += [f"## {group}", "", _about(group), ""]
        for offer in offers:
            found += [*_part(offer, offers), ""]
    return "\n".join(found)


def ours() -> dict[str, list[Offer]]:
    """The parts of this repository's packages, by group. All of the packages have to be installed."""
    found = installed()
    offers = [
        offer
        for group in found.list_groups()
        for offer in found.get_offers(group).values()
        if offer.distribution in OURS
    ]
    missing = OURS - {distribution.name for distribution in distributions()}  # one may offer commands alone
    if missing:
        raise SystemExit(f"not installed: {', '.join(sorted(missing))}; the page is of all packages together")
    offers.sort(key=lambda offer: len(offer.part.config.__mro__))  # what others build on first
    return {
        group: mine for group in found.list_groups() if (mine := [offer for offer in offers if offer.group == group])
    }


def _about(group: str) -> str:
    default = get_default_choices().get(group)
    if group in LISTS:
        usual = ",".join(default or [])
        return f"A list, `{group}=[{usual}]` by default; options are set as `{group}.<name>.<option>`."
    if group in BY_GROUP and BY_GROUP[group].chosen == "by command":
        return "Verbs of `gangline` read it, and no run."
    return f"`{group}={default or 'off'}` by default."


def _part(offer: Offer, others: Iterable[Offer]) -> Iterator[str]:
    part = offer.part
    supplier = "" if offer.distribution == "gangline-core" else f" From `{offer.distribution}`."
    depends = f" Depends on the layout: {part.layout_dependent}" if part.layout_dependent else ""
    yield from (f"### {offer.group}={part.name}", "", sentence(part.summary) + supplier + depends, "")
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
    """The nearest part that this one's configuration derives from, else the first with the same options.

    `others` are all parts of the group, in the order of the page.
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
