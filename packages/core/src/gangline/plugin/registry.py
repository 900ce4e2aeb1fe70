"""Registry of the installed parts: finds the part of a choice, or explains why it is not available. Torch-free.

Plugins define what exists, configuration defines what is chosen. A configuration can run only code of the parts listed
here: the registry is the allow-list.
"""

from __future__ import annotations

import difflib
import os
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from gangline.config.schema import EditConfig, PartConfig
from gangline.config.suggest import answer, explain_external
from gangline.errors import UserError
from gangline.plugin import catalogue
from gangline.plugin.discovery import VARIABLE, BrokenPlugin, Found, Offer, discover, find_version, normalise_name
from gangline.plugin.hooks import BY_GROUP, GROUPS, Command, Kind

OFF = "off"  # choice of no part, in every group that core does not define
SEE = "(gangline plugins  lists all parts and their packages)"


class Installed:
    """Everything that the plugins of this environment offer; created once, by `installed()`."""

    def __init__(self, found: Found) -> None:
        self._found = found

    @property
    def failures(self) -> list[BrokenPlugin]:
        """Plugins and parts that are installed but unusable, each with its cause."""
        return [*self._found.failures, *self._found.unbuilt.values()]

    @property
    def clashes(self) -> list[tuple[str, str]]:
        """(Clash, fix) for each name that two packages claim, or that GANGLINE_PLUGINS names but no package has."""
        return self._found.clashes

    def get_offers(self, group: str) -> dict[str, Offer]:
        """Return the installed parts of a group, by name."""
        return dict(self._found.offers.get(group, {}))

    def list_offers(self) -> list[Offer]:
        """Return the installed parts of all groups."""
        return [offer for offers in self._found.offers.values() for offer in offers.values()]

    def get_words(self) -> dict[str, str]:
        """Return words of other frameworks -> what to type, from the installed parts (`Part.words`)."""
        return {theirs: advice for offer in self.list_offers() for theirs, advice in offer.part.words.items()}

    def get_synonyms(self) -> dict[str, str]:
        """Return option path -> its names in other frameworks, from the installed parts (`Part.synonyms`)."""
        return {path: names for offer in self.list_offers() for path, names in offer.synonyms.items()}

    def list_groups(self) -> list[str]:
        """Return every group: core's groups in their order, then the groups of plugins and of the catalogue."""
        return list(dict.fromkeys([*GROUPS, *sorted(self._found.offers), *catalogue.list_groups()]))

    def edit_groups(self) -> set[str]:
        """Return the groups of model edits, of installed plugins and of the catalogue."""
        edits = (offer for offer in self.list_offers() if issubclass(offer.part.config, EditConfig))
        return {offer.group for offer in edits if not offer.viewed} | catalogue.edit_groups()

    def list_readers(self, group: str) -> list[str]:
        """Return the parts, as "group=name", that build the chosen part of a plugin's own group (`Part.reads`)."""
        every = self.list_offers()
        return sorted(f"{offer.group}={offer.part.name}" for offer in every if group in offer.part.reads)

    def find_choices(self, group: str) -> list[str]:
        """Return the names that a user may type after ``group=`` in this environment."""
        names = sorted(self.get_offers(group))
        chosen = group in BY_GROUP or "/" in group
        return names if chosen else [OFF, *(name for name in names if name != OFF)]

    def get_commands(self) -> dict[str, Command]:
        """Return the verbs of `gangline`, by name."""
        return dict(self._found.commands)

    def list_verbs(self, distribution: str) -> list[str]:
        """Return the verbs of `gangline` that a distribution supplies."""
        return [
            verb for verb, owner in self._found.owners.items() if normalise_name(owner) == normalise_name(distribution)
        ]

    def get_kinds(self) -> dict[str, Kind]:
        """Return the kinds of plugins that `gangline new-plugin` can write, by name."""
        return dict(self._found.kinds)

    def list_modules(self) -> list[ModuleType]:
        """Return the entry modules of the loaded plugins."""
        return list(self._found.modules)

    def find_part(self, config: PartConfig) -> Offer:
        """Return the part whose options class is exactly that of `config`. Raises UserError if there is none."""
        for offer in self.list_offers():
            if offer.part.config is type(config):
                return offer
        cls = type(config)
        raise UserError(
            f"no installed part has the configuration class {cls.__module__}.{cls.__qualname__}.",
            "The exact class of a configuration identifies its part; the package of the part may not be installed.",
            SEE,
        )

    def get_capability(self, config: type, name: str) -> str:
        """Return "module:name" of a capability of the part with options `config`, else of its nearest base, else ""."""
        capabilities = {offer.part.config: offer.part.capabilities for offer in self.list_offers()}
        return next((capabilities[cls][name] for cls in config.__mro__ if name in capabilities.get(cls, ())), "")

    def refuse_clashes(self) -> None:
        """Raise UserError for names that two packages claim, or that GANGLINE_PLUGINS names but no package has."""
        if self.clashes:
            raise UserError(*(line for clash in self.clashes for line in clash))

    def refuse_unknown_group(self, group: str, choice: str = "") -> None:
        """Raise UserError if there is no such group. choice: the text typed after its name, such as "=adamw"."""
        if group not in self.list_groups():
            close = difflib.get_close_matches(group, self.list_groups(), 1, 0.6)
            hint = f"Did you mean {close[0]}{choice}?" if close else ""
            raise UserError(f"there is no group {group!r}.", hint, f"Groups: {', '.join(self.list_groups())}.", SEE)

    def find(self, group: str, name: str) -> Offer:
        """Return the part `group=name`. Raises UserError with the cause, the command that fixes it and the choices."""
        self.refuse_unknown_group(group, f"={name}")
        if (clash := self._found.clashing.get((group, name))) is not None:
            raise UserError(*clash)
        if (failure := self._found.unbuilt.get((group, name))) is not None:
            raise UserError(f"{group}={name} cannot be used.", f"{failure.supplier} {failure.why}.", failure.fix)
        if (offer := self._found.offers.get(group, {}).get(name)) is not None:
            return offer
        raise UserError(
            f"{group}={name} is not available here.", *self.explain_absence(group, name), self.list_choices(group)
        )

    def explain_absence(self, group: str, name: str) -> list[str]:
        """Return why `group=name` is not available here and how to get it."""
        supplier = catalogue.find_supplier(group, name)
        if supplier is None:
            return self._suggest_names(group, name)
        for failure in self._found.failures:
            if normalise_name(failure.distribution) == normalise_name(supplier):
                return [f"{failure.supplier} {failure.why}", failure.fix]
        if (plugin := self._found.left_out.get(normalise_name(supplier))) is not None:
            return [f"{group}={name} is supplied by {supplier}, which {VARIABLE} excludes; add {plugin} to {VARIABLE}."]
        if (version := find_version(supplier)) is None:
            return [f"{group}={name} is supplied by {supplier}:  {catalogue.get(supplier)}"]
        return [f"{supplier} {version} is installed but lacks {group}={name}:  pip install --upgrade {supplier}"]

    def _suggest_names(self, group: str, name: str) -> list[str]:
        """Return lines for an unknown part name: the nearest name, failed plugins, or packages to install."""
        if lines := self._explain_files(group, name) or explain_external(name, self.find_choices("track")):
            return lines
        close = difflib.get_close_matches(name, [*self.find_choices(group), *catalogue.list_names(group)], 1, 0.5)
        guess = f"Did you mean {group}={close[0]}?" if close else answer(name, "", self.get_words())
        lines = [guess] if guess else []
        for failure in self._found.failures:
            lines += [f"{failure.supplier} may offer {group}={name}, but the package {failure.why}", failure.fix]
        return lines if guess else [*lines, *self.list_missing_suppliers(group)]

    def _explain_files(self, group: str, name: str) -> list[str]:
        """Return lines for a name that is a path of text files or of weights; [] for any other name."""
        if group == "data" and ("/" in name or "*" in name or Path(name).exists()):
            return [f"To read files:  {shlex.quote(f'data.path={name}')}"]
        if group == "model" and "/" in name:
            return [f"To train from a directory of weights:  gangline import {shlex.quote(name)}  prints the command."]
        return []

    def list_missing_suppliers(self, group: str) -> list[str]:
        """Return a line for each distribution that offers further parts of a group and is not installed."""
        others = catalogue.find_suppliers(group).items()
        return [f"{dist} offers {what}:  {catalogue.get(dist)}" for dist, what in others if not find_version(dist)]

    def list_choices(self, group: str) -> str:
        """Return the line with the installed choices of a group, which ends every message about a choice."""
        return f"Installed choices for {group}: {', '.join(self.find_choices(group)) or 'none'}.   {SEE}"


@cache
def installed() -> Installed:
    """Return the registry of this environment. Plugin errors do not raise: see `Installed.failures` and `clashes`."""
    return Installed(discover(os.environ))


def load(spec: str) -> Any:
    """Import and return the object that "package.module:name" names."""
    module, _, name = spec.partition(":")
    return getattr(import_module(module), name)


def load_capability(config: PartConfig, name: str) -> Any:
    """Import and return a capability of the part with this configuration; None if the part does not have it.

    A part whose options class derives from another part's class inherits the capabilities that it does not define.
    Raises UserError if the package that supplies the capability is missing.
    """
    offer = installed().find_part(config)
    if not (spec := installed().get_capability(type(config), name)):
        return None
    try:
        return load(spec)
    except ModuleNotFoundError as error:
        if not (lines := catalogue.explain_missing(error)):
            raise
        raise UserError(f"{offer.group}={offer.part.name} needs {lines[0]}.", lines[1]) from error


def build(config: PartConfig, *args: Any, **kwargs: Any) -> Any:
    """Import the part's build function and return its result. Raises UserError if a package is missing."""
    offer = installed().find_part(config)
    part = offer.part
    try:
        make = load(part.build)
    except ModuleNotFoundError as error:
        own = part.build.partition(":")[0].partition(".")[0]
        if error.name is None or error.name.partition(".")[0] == own:
            raise  # the part names a module that it does not have: a bug
        raise UserError(
            f"{offer.group}={part.name} needs the Python package {error.name!r}, which is not installed.",
            f"To install the requirements of {offer.supplier}:  pip install --upgrade {offer.distribution}",
        ) from error
    return make(config, *args, **kwargs)
