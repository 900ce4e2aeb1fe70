"""Options of a run with given parts: an unknown key is refused with suggestions of known options. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_origin

from gangline.config.defaults import get_default_choices
from gangline.config.fields import Option, get_defaults, iterate_options
from gangline.config.sections import SECTIONS
from gangline.config.suggest import answer, explain_external, suggest_near, suggest_synonym
from gangline.config.values import list_alternatives
from gangline.errors import UserError
from gangline.plugin import catalogue
from gangline.plugin.hooks import LISTS
from gangline.plugin.registry import OFF, Offer, installed

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


LAYERS = ("recipe", "from", "weights", "resume")  # keys that are read before all overrides


class KnownOptions:
    """All options of one run, by the path that a user types."""

    def __init__(self, offers: Mapping[str, Offer]) -> None:
        self._offers = offers
        self.options = {option.path: option for option in self._iterate_options()}

    def _iterate_options(self) -> Iterator[Option]:
        for name, section in SECTIONS.items():
            yield from iterate_options(section, name)
        for place, offer in self._offers.items():
            if not self._is_opened(place):
                inner = {name: self._offers.get(f"{place}.{name}") for name in offer.part.opens}
                inner_classes = {name: inner_offer.part.config for name, inner_offer in inner.items() if inner_offer}
                yield from iterate_options(offer.part.config, place, inner_classes)

    def _is_opened(self, place: str) -> bool:
        """Return whether `place` is a group inside another part, so that the part contains the group's options."""
        parent = place.rpartition(".")[0]
        return parent in self._offers

    def format_setting(self, override: Override) -> str:
        """Return a setting as a Hydra override, "++key=value". Raises UserError for an unknown option."""
        path, text = override.key_or_group, override.get_value_string()
        option = self.options.get(path) or self._find_mapping_above(path)
        if option is None:
            if any(option_path.startswith(path + ".") for option_path in self.options):
                self._refuse_section(path)
            raise self._explain_unknown(path, text)
        value = override.value()
        refers = text.startswith("${")  # to another option, or to a variable of the environment
        if _is_mapping(option.hint) and path == option.path and not refers and not isinstance(value, dict | None):
            typed = f"Type  {path}={{NAME:VALUE}}  ({option.comment})"
            raise UserError(f"{path}={text}: this option is a mapping.", typed)
        if _is_text(option.hint) and isinstance(value, bool | int | float) and path == option.path:
            text = f'"{text}"'  # text that looks like a number stays text
        return f"++{path}={text}"

    def _find_mapping_above(self, path: str) -> Option | None:
        """Return the option around `path` if that option is a mapping with free keys, else None."""
        while "." in path:
            path = path.rpartition(".")[0]
            option = self.options.get(path)
            if option is not None:
                return option if _is_mapping(option.hint) else None
        return None

    def _refuse_section(self, path: str) -> None:
        inner = [option_path for option_path in self.options if option_path.startswith(path + ".")]
        raise UserError(f"{path} is a section; set one of its options.", f"Options: {', '.join(inner)}.")

    def _explain_unknown(self, path: str, text: str) -> UserError:
        """Return the error for an unknown key, with suggestions of what the user may have meant."""
        what = f"there is no option {path}."
        head, _, rest = path.partition(".")
        groups = installed().list_groups()
        places = sorted((place for place in [*SECTIONS, *self._offers] if path.startswith(place + ".")), key=len)
        if places:
            return UserError(what, *self._explain_within(places[-1], path, text))
        if head in LISTS and rest:
            name = rest.partition(".")[0]
            if lines := explain_external(name, _list_parts("track")):
                return UserError(what, *lines)
            if name in _list_parts(head):
                add = f"{head}={name} is not chosen; add it:  {head}=[...,{name}]"
                return UserError(what, add, *_explain_install(f"{head}={name}"))
            inner = [option_path for option_path in self.options if option_path.startswith(head + ".")]
            return UserError(what, suggest_near(path, inner), f"Options: {', '.join(inner) or 'none'}.")
        if head in groups:
            hint = f"{head} is {OFF} in this run; choose a part first:  {head}=<name>"
            return UserError(what, hint, *installed().list_missing_suppliers(head), installed().list_choices(head))
        listing = f"Groups: {', '.join(groups)}. Sections: {', '.join(SECTIONS)}."
        if rest:
            if line := answer(path, text, installed().get_words()):
                return UserError(what, line, *_explain_install(line), listing)
            guess = (
                suggest_synonym(path, self.options, installed().get_synonyms())
                or suggest_near(path, self.options)
                or suggest_near(head, [*groups, *SECTIONS])
            )
            return UserError(what, guess, listing)
        what = f"there is no group {path}, and no option."
        if lines := explain_external(path, _list_parts("track")):
            return UserError(what, *lines)
        return UserError(what, *(self.suggest(path, text) or [suggest_near(path, [*groups, *LAYERS])]), listing)

    def suggest(self, path: str, text: str) -> list[str]:
        """Return lines that name what a user may have meant by the word `path` with the value `text`; [] if unknown."""
        groups = installed().list_groups()
        words = [f"{option_path}={text}" for option_path in self.options if option_path.rpartition(".")[2] == path]
        switched = text.lower() in ("true", "on", "1", "yes")  # bf16=true
        pairs = [(group, path) for group in groups if switched and path in _list_parts(group)][:1]  # bf16: precision
        if not words and (line := answer(path, text, installed().get_words())):
            return [line, *_explain_install(line)]
        if not words and not pairs and (line := suggest_synonym(path, self.options, installed().get_synonyms())):
            return [line]
        pairs = pairs or [(group, text) for group in groups if text in _list_parts(group)]
        if words or not pairs:
            return [f"Did you mean {' or '.join(words)}?"] if words else []
        words = [
            f"{group}=[{','.join(_add_member(group, name))}]" if group in LISTS else f"{group}={name}"
            for group, name in pairs
        ]
        return [f"Did you mean {' or '.join(words)}?", *_explain_install(*(f"{group}={name}" for group, name in pairs))]

    def _explain_within(self, place: str, path: str, text: str) -> list[str]:
        own = [option_path for option_path in self.options if option_path.startswith(place + ".")]
        listing = f"Options: {', '.join(name.removeprefix(place + '.') for name in own)}." if own else "No options."
        offer = self._offers.get(place)
        last = path.removeprefix(place + ".")
        close = suggest_near(last, (name.removeprefix(place + ".") for name in own), 0.7)
        alike = [name for name in own if f"_{last}_" in f"_{name.rpartition('.')[2]}_"]  # batch.size
        close = close.replace("mean ", f"mean {place}.") or (f"Did you mean {' or '.join(alike)}?" if alike else "")
        synonym = suggest_synonym(path, self.options, installed().get_synonyms())
        lines = [answer(path, text, installed().get_words()) or synonym or close]
        if offer is not None:
            others = [
                other.part.name
                for other in installed().get_offers(offer.group).values()
                if last in get_defaults(other.part.config)
            ]
            if others:
                lines.append(f"Parts of {offer.group} that have the option {last}: {', '.join(sorted(others))}.")
        return [*lines, listing]


def _list_parts(group: str) -> list[str]:
    """Return the names of the parts of a group, installed or not."""
    return list(dict.fromkeys([*installed().get_offers(group), *catalogue.list_names(group)]))


def _add_member(group: str, name: str) -> list[str]:
    """Return the default parts of a list group, followed by `name`."""
    return list(dict.fromkeys([*get_default_choices()[group], name]))


def _explain_install(*lines: str) -> list[str]:
    """Return how to install the missing parts that `lines` name as group=part."""
    pairs = dict.fromkeys(pair for line in lines for pair in re.findall(r"(\w+)=(\w+)", line))
    absent = [
        pair for pair in pairs if catalogue.find_supplier(*pair) and pair[1] not in installed().get_offers(pair[0])
    ]
    return list(dict.fromkeys(line for pair in absent for line in installed().explain_absence(*pair)))


def _is_text(hint: Any) -> bool:
    return str in (members := list_alternatives(hint)) and not {bool, int, float} & set(members)


def _is_mapping(hint: Any) -> bool:
    return any((get_origin(member) or member) is dict or member is Any for member in list_alternatives(hint))
