"""Validation sets: named sets of held-out data, each the run's data part with other options. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from gangline.config.schema import DataConfig, PartConfig, Run
from gangline.config.serial import fill
from gangline.config.values import to_plain
from gangline.errors import Problem, UserError
from gangline.plugin.registry import installed

_NAME = re.compile(r"\w[\w-]*")  # no dots or slashes: a name is part of an option's path and of a curve's tag
PATH = "validate.sets"


def build_validation_sets(run: Run) -> dict[str, DataConfig]:
    """Return the data options of every validation set, by name. Raises UserError with all problems."""
    sets, problems = read_sets(run)
    if problems:
        raise UserError.of(problems)
    return sets


def read_sets(run: Run) -> tuple[dict[str, DataConfig], list[Problem]]:
    """Return (valid sets by name, problems of the other sets), without sets whose value is null."""
    sets: dict[str, DataConfig] = {}
    problems: list[Problem] = []
    offer = installed().find_part(run.data)
    inner_classes = {name: type(getattr(run.data, name)) for name in offer.part.opens}
    for name, options in run.validate.sets.items():
        if not _NAME.fullmatch(name):
            problems.append(Problem(f"{PATH}: {name!r} is not a valid name.", "Valid: letters, digits, '_', '-'.", ""))
        elif options is not None:
            config = fill(
                type(run.data), _override(run.data, options), f"{PATH}.{name}", problems, inner_classes, offer
            )
            if config is not None:
                sets[name] = config
    return sets, problems


def check_sets(run: Run) -> list[Problem]:
    """Return problems of the sets before data is read: unknown options, wrong values, problems of the data part."""
    sets, problems = read_sets(run)
    for name, config in sets.items():
        part_problems = check_part(f"{PATH}.{name}", config, run)
        problems += [Problem(f"{PATH}.{name}: {problem.what}", problem.why, problem.fix) for problem in part_problems]
    return problems


def check_part(place: str, config: PartConfig, run: Run) -> list[Problem]:
    """Return the problems that a part's check finds. A crash of the check keeps its traceback and names the part."""
    try:
        return [] if run.launch.defers_check(config) else list(config.check(run))
    except UserError:
        raise
    except Exception as error:
        offer = installed().find_part(config)
        choice = f"{place.removesuffix(f'.{offer.part.name}')}={offer.part.name}"
        error.add_note(f"raised by the check of {choice} ({offer.distribution} {offer.version})")
        raise


def _override(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain options of a configuration, overridden by `options`; nested dataclasses option by option."""
    merged = to_plain(config)
    for name, value in options.items():
        inner = getattr(config, name, None)
        deeper = is_dataclass(inner) and isinstance(value, Mapping)
        merged[name] = _override(inner, value) if deeper else value
    return merged
