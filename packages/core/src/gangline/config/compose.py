"""Composition of runs from overrides: Hydra merges the chosen parts, a recipe and settings into typed dataclasses.

Hydra only parses the overrides, stores the options of each part, merges, and resolves interpolations. The registry
alone decides which parts exist: no `_target_`, no search path, no `instantiate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import hydra
from hydra import compose as hydra_compose
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from gangline.config.fields import get_defaults, get_opened_defaults
from gangline.config.known_options import KnownOptions
from gangline.config.preflight import Asked, read_request, sweep
from gangline.config.programs import find_suspects, refuse_suspects
from gangline.config.recipes import read_recipe
from gangline.config.schema import Run
from gangline.config.sections import SECTIONS
from gangline.config.serial import from_dict
from gangline.errors import UserError
from gangline.plugin.hooks import LISTS
from gangline.plugin.registry import installed
from gangline.run.directory import RunDirectory

_ROOT = "gangline"
_REFERENCE, _HIDDEN = "${oc.env:", "\0{oc.env:"
_ENVIRONMENT, _SHOWN = re.compile(r"\$\{\s*oc\.env\s*:"), re.compile(re.escape(_HIDDEN))
_WHY = "Another user may have written that file, so only the command line may set this value."
# Hydra below 1.4 requires `version_base`, and 1.4 warns about it; 1.4 requires `replace` to replace a node.
_OLD = tuple(int(number) for number in hydra.__version__.split(".")[:2]) < (1, 4)
_INITIALIZE: dict[str, Any] = {"version_base": None} if _OLD else {}
_STORE: dict[str, Any] = {} if _OLD else {"replace": True}


def compose(words: Sequence[str]) -> list[Run]:
    """Return the run that the overrides describe, or several if an override has several values (`parallel=single,ddp`).

    `recipe=<name>` and `from=<run directory>` are layers below the other overrides. Raises UserError.
    """
    return [compose_one(combination) for combination in sweep(words)]


def compose_over(layer: Mapping[str, Any], words: Sequence[str], source: str = "", why: str = "") -> Run:
    """Return the run `layer`, plain data (`gangline.config.serial.to_dict`), with the overrides `words`.

    source: origin of the layer, for messages. why: reason to refuse options of the layer that run code; "": none.
    """
    return _run(read_request(words, [layer]), source, why)


def compose_one(words: Sequence[str]) -> Run:
    """Return the run that the overrides describe. Raises UserError, also for an override with several values.

    `weights=` is short for `run.weights=`.
    """
    installed().refuse_clashes()  # first: a package that a clash disables may have the recipe
    layers, rest, files = [], [], []
    for word in words:
        key, _, value = word.partition("=")
        if key == "recipe":
            layers.append(read_recipe(value))
        elif key == "from":
            layers.insert(0, read_earlier(value))
        elif key == "weights":
            rest.append(f"run.weights={value}")
        else:
            rest.append(word)
            continue
        files.append(word)
    return _run(read_request(rest, layers), " or ".join(files), _WHY if files else "")


def read_earlier(path: str) -> dict[str, Any]:
    """Return the configuration of an earlier run for a new run, without its directory and `run.weights`."""
    content = RunDirectory.open(path).read_content()
    content["run"] = {**content.get("run", {}), "dir": None, "weights": None}
    return content


def _run(asked: Asked, source: str, why: str) -> Run:
    """Return the run; refuse values of untrusted files (`why`) that run code, unless the command line repeats them."""
    content = _compose(asked)
    options = KnownOptions(asked.offers).options if why else {}
    if why and (suspected := find_suspects(content, options)):
        with suppress(UserError):  # overrides that cannot be composed alone allow no setting
            suspected = find_suspects(content, options, _compose(replace(asked, layers=[])))
        refuse_suspects(suspected, options, source, why)
    return from_dict({**content, "parts": dict(asked.choices)})


def _compose(asked: Asked) -> dict[str, Any]:
    """Return every option value as plain data. Raises UserError if Hydra cannot compose them."""
    _store(asked)
    try:
        with hydra.initialize(config_path=None, **_INITIALIZE), _hide_environment():
            return _resolve(hydra_compose(_ROOT, overrides=asked.values))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError("the configuration cannot be composed.", _explain(error)) from error


def _explain(error: BaseException) -> str:
    """Return the message of Hydra or OmegaConf in one line, with the option if they name it."""
    message = f"{error} {error.__cause__ or ''}"
    if "\0" in message or r"\x00" in message:
        return "${oc.env:NAME} is not supported inside another ${...} reference."
    pieces = [line.strip() for line in message.splitlines() if "object_type=" not in line]
    return "; ".join(dict.fromkeys(filter(None, pieces)))


def _store(asked: Asked) -> None:
    """Store the sections, each chosen part's options and the layers in Hydra's ConfigStore, to be merged in order."""
    store = ConfigStore.instance()
    order: list[Any] = ["_self_"]
    for place, offer in asked.offers.items():
        holder, _, name = place.rpartition(".")
        defaults = get_defaults(offer.part.config)
        if holder in asked.offers:
            defaults = get_opened_defaults(asked.offers[holder].part.config, name, offer.part.config)
        node = {key: value for key, value in defaults.items() if key not in offer.part.opens}
        store.store(group=offer.group, name=offer.part.name, node=node, package=place, **_STORE)
        if offer.group not in LISTS:
            order.append({offer.group: offer.part.name})
    order += [{group: list(asked.choices[group])} for group in LISTS]
    for number, layer in enumerate(asked.layers):
        store.store(group=f"{_ROOT}_layer", name=str(number), node=layer, package="_global_", **_STORE)
        order.append(f"{_ROOT}_layer/{number}")
    root = {"defaults": order, **{name: get_defaults(section) for name, section in SECTIONS.items()}}
    store.store(name=_ROOT, node=root, **_STORE)


def _resolve(config: Any) -> dict[str, Any]:
    """Return plain data with interpolations resolved, except environment variables, which `serial` looks up."""
    hidden = _respell(OmegaConf.to_container(config, resolve=False), _ENVIRONMENT, _HIDDEN)
    return _respell(OmegaConf.to_container(OmegaConf.create(hidden), resolve=True), _SHOWN, _REFERENCE)


@contextmanager
def _hide_environment() -> Iterator[None]:
    """Make OmegaConf refuse oddly spelled references to the environment in the block, so that no secret is written."""
    OmegaConf.register_new_resolver("oc.env", _refuse_odd_spelling, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _refuse_odd_spelling(*words: Any) -> str:
    raise ValueError("a reference to an environment variable must be spelled ${oc.env:NAME}")


def _respell(value: Any, old: re.Pattern[str], new: str) -> Any:
    """Return the data with each match of `old` in a string replaced by `new`."""
    if isinstance(value, dict):
        return {str(key): _respell(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_respell(item, old, new) for item in value]
    return old.sub(lambda _: new, value) if isinstance(value, str) else value
