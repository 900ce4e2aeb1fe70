"""Parts and options that a command line names, for help and completion: unknown names are skipped. No Hydra."""

from __future__ import annotations

from collections.abc import Sequence

from gangline.config.defaults import get_default_choices
from gangline.config.known_options import KnownOptions
from gangline.errors import UserError
from gangline.plugin.hooks import LISTS
from gangline.plugin.registry import Offer, installed


def parse_choices(words: Sequence[str]) -> dict[str, list[str]]:
    """Return group -> names of the parts that the arguments choose in it."""
    groups = set(installed().list_groups())
    pairs = [(key.lstrip("+"), value) for key, _, value in (word.partition("=") for word in words)]
    return {group: [name for name in value.strip("[]").split(",") if name] for group, value in pairs if group in groups}


def list_options(words: Sequence[str]) -> KnownOptions:
    """Return the options of the run that the arguments describe, with default parts in all other groups."""
    overrides = parse_choices(words)
    choices = {
        group: [name] if isinstance(name, str) else list(name) for group, name in get_default_choices().items()
    } | overrides
    offers: dict[str, Offer] = {}
    for group in sorted(choices, key=lambda group: "/" in group):
        for name in choices[group] if group in LISTS else choices[group][-1:]:
            try:
                offer = installed().find(group, "on" if name.lower() == "true" else name)
            except UserError:
                continue
            place = f"{group}.{name}" if group in LISTS else group.replace("/", ".")
            if "/" in group and place.rpartition(".")[0] not in offers:
                continue
            offers[place] = offer
            for inner, default in offer.part.opens.items():
                if inner_offer := installed().get_offers(f"{group}/{inner}").get(default):
                    offers.setdefault(f"{place}.{inner}", inner_offer)
    return KnownOptions(offers)
