"""Ranges of option values: declared on the field, reported in one message before any file is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, nan
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Interval, IsFinite, IsNotNan, Le, Len, Lt, MultipleOf, Not, Predicate

from gangline.config.check import check, find_meaningless
from gangline.config.defaults import build_default_run
from gangline.config.fields import iterate_options, read_comments
from gangline.config.ranges import (
    OneOf,
    PositiveInt,
    ShareBelowOne,
    explain_wrong,
    format_range,
    list_choices,
    states_all,
)
from gangline.errors import UserError
from gangline_basics.launch.config import LocalLaunch
from gangline_basics.model.config import DecoderConfig
from gangline_basics.optimizer.config import Adamw, Muon
from gangline_basics.parallel.config import Ddp, Single
from gangline_basics.precision.config import Fp16
from gangline_basics.schedule.config import Cosine, Wsd
from gangline_basics.track.config import Console

ONE_SIDED = Annotated[IsNotNan[float], Gt(1)]


@pytest.mark.parametrize(
    ("hint", "value", "complaint"),
    [
        (PositiveInt, 1, None),
        (PositiveInt, 0, "must be at least 1"),
        (PositiveInt | None, None, None),
        (PositiveInt | None, 0, "must be at least 1"),
        (PositiveInt | Literal["auto"] | None, "auto", None),
        (PositiveInt | Literal["auto"] | None, -1, "must be at least 1"),
        (Annotated[int | None, Ge(1)], None, None),
        (ShareBelowOne, 1.0, "must be at least 0 and less than 1"),
        (ShareBelowOne, 0, None),
        (Annotated[float, Le(2)], 3, "must be at most 2"),
        (
            Annotated[int, Interval(gt=0, le=8), MultipleOf(2)],
            3,
            "must be more than 0 and at most 8 and a multiple of 2",
        ),
        (Annotated[list[PositiveInt], Len(1, 2)], [], "must be at least 1 long and at most 2 long"),
        (Annotated[list[PositiveInt], Len(1, 2)], [0], "must each be at least 1"),
        (Annotated[str, Predicate(str.isprintable)], "a\n", "must be printable text in one line"),
        (Annotated[str, Predicate(str.islower)], "A", "must be lower"),
        (Annotated[str, Predicate(Not(str.islower))], "A", None),
        (Annotated[int, "a note"], -1, None),
        (Annotated[float, Ge(0)], nan, "must be finite and at least 0"),
        (Annotated[float, Ge(0)], inf, "must be finite and at least 0"),
        (ONE_SIDED, inf, None),
        (ONE_SIDED, nan, "must be more than 1, or inf"),
        (float, nan, "must be finite"),
        (float | None, -inf, "must be finite"),
        (float, 7, None),
        (IsFinite[int], -5, None),
        (IsFinite[float], nan, "must be finite"),
        (Literal["a", "b"], "c", "must be one of a, b"),
        (Annotated[str, OneOf(("a", "b"))], "c", "must be one of a, b"),
        (list[PositiveInt] | None, [1, 0], "must each be at least 1"),
        (list[Literal["a"]], ["b"], "must each be one of a"),
        (tuple[ShareBelowOne, PositiveInt], (0.5, 0), "must each be at least 1"),
        (tuple[ShareBelowOne, ShareBelowOne], (0.5,), "must be 2 values"),
        (tuple[PositiveInt, ...], (1, 2, 0), "must each be at least 1"),
        (dict[str, PositiveInt], {"a": 0}, "must each be at least 1"),
        (dict[str, Any], {"a": 0}, None),
        (bool, False, None),
    ],
)
def test_value_out_of_range_is_explained(hint, value, complaint):
    assert explain_wrong(hint, value) == complaint


def test_range_is_formatted_as_text():
    assert format_range(PositiveInt | None) == "at least 1"
    assert format_range(list[ShareBelowOne]) == "each at least 0 and less than 1"
    assert format_range(Annotated[int, Ge(1), Lt(9)] | Literal["auto"]) == "at least 1 and less than 9"
    assert format_range(Annotated[int, Ge(1), Le(1_000_000)]) == "at least 1 and at most 1000000"
    assert format_range(Annotated[float, Gt(1234567.5), Lt(2.5e6)]) == "more than 1234567.5 and less than 2500000"
    assert format_range(Annotated[float, Ge(1e-9)]) == "at least 1e-09"
    assert format_range(str) == ""
    assert list_choices(Literal[0, 1] | None) == ["0", "1"]
    assert list_choices(Annotated[str, OneOf({"a": 1})]) == ["a"]


def test_types_without_range_are_detected():
    assert all(map(states_all, (PositiveInt, list[PositiveInt] | None, Literal[1, 2], str, bool, ONE_SIDED)))
    assert not any(map(states_all, (int, float | None, list[int], tuple[PositiveInt, float], dict[str, int])))


@dataclass
class Base:
    rate: Annotated[float, Ge(0)] = 0.1  # how fast
    count: PositiveInt | None = None
    order: Literal["once", "again"] = "once"  # whether samples come back
    long: Annotated[dict[str, Annotated[list[ShareBelowOne], "of no weight here"]], "nor this"] = field(
        default_factory=dict  # said inside, where the line is full
    )


@dataclass
class Derived(Base):
    rate: float = 0.5
    count: Annotated[int, Ge(2)] | None = 3


def test_subclass_with_new_default_keeps_range():
    found = {option.path: option for option in iterate_options(Derived, "x")}
    assert found["x.rate"].help == "how fast (at least 0)"
    assert found["x.count"].help == "at least 2"
    assert found["x.order"].help == "whether samples come back (one of once, again)"
    assert found["x.long"].help == "said inside, where the line is full (each at least 0 and less than 1)"
    assert found["x.order"].choices == ["once", "again"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Adamw(learning_rate=-1e-3), "optimizer.learning_rate=-0.001 must be at least 0."),
        (Adamw(learning_rate=nan), "optimizer.learning_rate=nan must be finite and at least 0."),
        (Adamw(clip_norm=-1.0), "optimizer.clip_norm=-1.0 must be more than 0."),
        (Adamw(clip_norm=nan), "optimizer.clip_norm=nan must be finite and more than 0."),
        (Adamw(betas=(0.9,)), "optimizer.betas=[0.9] must be 2 values."),
        (Adamw(betas=(0.9, 1.0)), "optimizer.betas=[0.9,1.0] must each be at least 0 and less than 1."),
        (Adamw(weight_decay=-0.1), "optimizer.weight_decay=-0.1 must be at least 0."),
        (Muon(momentum=1.0), "optimizer.momentum=1.0 must be at least 0 and less than 1."),
        (Muon(ns_steps=0), "optimizer.ns_steps=0 must be at least 1."),
        (DecoderConfig(norm_eps=-1.0), "model.norm_eps=-1.0 must be at least 0."),
        (DecoderConfig(layers=0), "model.layers=0 must be at least 1."),
        (DecoderConfig(rope_theta=0.0), "model.rope_theta=0.0 must be more than 0."),
        (Cosine(final=1.5), "schedule.final=1.5 must be at least 0 and at most 1."),
        (Wsd(decay_steps=-1), "schedule.decay_steps=-1 must be at least 0."),
        (Fp16(min_scale=0.0), "precision.min_scale=0.0 must be more than 0."),
        (Fp16(growth_interval=0), "precision.growth_interval=0 must be at least 1."),
        (Single(groups=0), "parallel.groups=0 must be at least 1."),
        (Ddp(bucket_mb=0.0), "parallel.bucket_mb=0.0 must be more than 0."),
        (LocalLaunch(max_restarts=-1), "launch.max_restarts=-1 must be at least 0."),
        (LocalLaunch(monitor_interval=0.0), "launch.monitor_interval=0.0 must be more than 0."),
        (LocalLaunch(grace_seconds=-1.0), "launch.grace_seconds=-1.0 must be at least 0."),
    ],
)
def test_option_out_of_range_is_refused(config, message):
    group = message.partition(".")[0]
    with pytest.raises(UserError) as caught:
        check(build_default_run(**{group: config}))
    assert str(caught.value).startswith(message)
    assert f"The default:  {message.partition('=')[0]}=" in str(caught.value)


def test_list_part_option_out_of_range_is_reported():
    (problem,) = find_meaningless(build_default_run(track=[Console(every=0)]))
    assert problem.what == "track.console.every=0 must be at least 1."


def test_misspelled_choice_gets_suggestion():
    run = build_default_run()
    run.data.encoding_errors = "stric"
    (problem,) = find_meaningless(run)
    assert (problem.what, problem.why) == (
        "data.encoding_errors=stric must be one of replace, ignore, strict.",
        "Did you mean strict?",
    )


@dataclass
class Commented:
    """Configuration with help after an option and above an option."""

    short: int = 1  # one line
    # a help text
    # of two lines
    long: int = 2
    own: int = 3  # of the base

    bare: int = 4


@dataclass
class Narrow(Commented):
    """Configuration with another default."""

    # measured: five is better
    own: int = 5


def test_option_help_is_comment_after_or_above() -> None:
    assert read_comments(Narrow) == {"short": "one line", "long": "a help text of two lines", "own": "of the base"}
