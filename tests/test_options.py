"""Every option of every part: range of values, default within the range, choices in help and completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gangline.config.defaults import build_default_run
from gangline.config.fields import REQUIRED, Option, get_defaults, iterate_options
from gangline.config.ranges import explain_wrong, states_all
from gangline.config.sections import SECTIONS
from gangline.config.values import convert
from gangline.plugin.hooks import GROUPS, LISTS
from gangline.plugin.registry import installed

HOW = """{path}: a number without a range. Say which values have a meaning, beside the type:
    from annotated_types import Ge, IsFinite, Lt
    from gangline.config import PositiveInt
    steps: PositiveInt = 10                                  (also NonNegativeInt, PositiveFloat, Share, ...)
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    offset: IsFinite[int] = 0                                where every finite number has one
What depends on other options is for the part's own `check`, which comes after the ranges."""


def every_option() -> Iterator[tuple[str, Option]]:
    """Yield (section, group or `group=part`, option) for every option."""
    classes: dict[str, type] = {**SECTIONS, **GROUPS}
    for group in installed().list_groups():
        classes |= {f"{group}={name}": offer.part.config for name, offer in installed().get_offers(group).items()}
    for choice, cls in classes.items():
        for option in iterate_options(cls, choice):
            yield choice, option


def test_every_number_states_a_range():
    silent = [HOW.format(path=option.path) for _, option in every_option() if not states_all(option.stated)]
    assert not silent, "\n".join(silent)


def test_every_default_is_in_its_range():
    found = [option for _, option in every_option() if option.default != REQUIRED]
    outside = {
        option.path: option.default
        for option in found
        if explain_wrong(option.stated, convert(option.hint, option.default))
    }
    assert len(found) > 250
    assert outside == {}


def test_option_default_matches_default_configuration():
    """Check nested options too: the outer dataclass may override the defaults of the inner one."""
    classes: dict[str, type] = {**SECTIONS}
    for group in installed().list_groups():
        classes |= {f"{group}={name}": offer.part.config for name, offer in installed().get_offers(group).items()}
    for choice, cls in classes.items():
        found = [option for option in iterate_options(cls, choice) if option.default != REQUIRED]
        whole = get_defaults(cls)
        for option in found:
            value: Any = whole
            for name in option.path.removeprefix(f"{choice}.").split("."):
                value = option.default if value is None else value[name]
            assert option.default == value, option.path


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in LISTS])
def test_option_choices_appear_in_help_and_completion(group):
    """Check the default part of each group; help and completion read one table of options."""
    from gangline.cli.complete import list_candidates
    from gangline.cli.help import render_help

    part = installed().find_part(getattr(build_default_run(), group)).part
    page = " ".join(render_help([f"{group}={part.name}"]).split())
    for option in iterate_options(part.config, group):
        assert option.help in page
        assert set(option.choices) <= {word.partition("=")[2] for word in list_candidates([f"{option.path}="])}
