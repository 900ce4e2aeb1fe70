"""Runs as plain data and back: YAML round trip, all mistakes reported, environment references."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from gangline.config import Recompute
from gangline.config.defaults import build_default_run
from gangline.config.sections import SECTIONS
from gangline.config.serial import fill, from_dict, to_dict
from gangline.config.values import InvalidValue, convert, describe, to_plain
from gangline.errors import UserError
from gangline.plugin.hooks import LISTS
from gangline.plugin.registry import installed
from gangline_basics.optimizer.config import Adamw

pytestmark = pytest.mark.usefixtures("core_alone")


def through_yaml(content: dict) -> dict:
    return yaml.safe_load(yaml.safe_dump(content, sort_keys=False))


def test_run_round_trips_through_yaml():
    run = build_default_run(optimizer=Adamw(learning_rate=1e-5), run={"name": "on", "steps": 7}, model="llama3-8b")
    assert from_dict(through_yaml(to_dict(run))) == run


def parts_of_core() -> list[tuple[str, str]]:
    every = [
        offer
        for group in installed().list_groups()
        if group not in LISTS
        for offer in installed().get_offers(group).values()
    ]
    return [
        (offer.group, offer.part.name) for offer in every if offer.distribution in ("gangline-core", "gangline-basics")
    ]


@pytest.mark.parametrize(("group", "name"), parts_of_core())
def test_every_core_part_round_trips_through_yaml(group, name):
    run = build_default_run(**{group: name})
    content = through_yaml(to_dict(run))
    assert content["parts"][group] == name
    assert from_dict(content) == run


@given(
    steps=st.integers(1, 10**9),
    rate=st.floats(1e-12, 1e3),
    name=st.text(max_size=20),
    micro=st.none() | st.integers(1, 64),
    path=st.none() | st.text() | st.lists(st.text(), max_size=3),
    recompute=st.sampled_from(Recompute),
)
@settings(max_examples=100, deadline=None)
def test_option_values_round_trip_through_yaml(steps, rate, name, micro, path, recompute):
    run = build_default_run(
        run={"steps": steps, "name": name, "recompute": recompute},
        batch={"micro_size": micro},
        optimizer=Adamw(learning_rate=rate),
    )
    run.data.path = path
    assert from_dict(through_yaml(to_dict(run))) == run


def test_run_document_is_complete():
    content = to_dict(build_default_run(track=["jsonl"]))
    assert content["parts"]["track"] == ["jsonl"]
    assert set(content["track"]) == {"jsonl"}
    assert set(SECTIONS) < set(content)
    assert content["parts"]["health"] == []
    assert content["run"]["dir"] is None  # an unset option stays unset


def test_all_mistakes_are_reported_at_once():
    content = to_dict(build_default_run())
    content["run"]["stepz"] = 3
    content["optimizer"]["learning_rate"] = "fast"
    content["batch"]["global_size"] = None
    content["surprise"] = {}
    with pytest.raises(UserError) as caught:
        from_dict(content)
    message = str(caught.value)
    assert message.startswith("4 problems:")
    assert "run.stepz: run has no such option." in message
    assert "Did you mean steps?" in message
    assert "optimizer.learning_rate=fast: expected a number, got 'fast'." in message
    assert "batch.global_size=null: expected an integer, got null." in message
    assert "there is no section surprise." in message


def test_options_of_another_part_are_refused():
    content = to_dict(build_default_run(optimizer="muon"))
    content["parts"]["optimizer"] = "adamw"
    with pytest.raises(UserError, match="optimizer=adamw has no such option"):
        from_dict(content)


def test_a_group_without_a_part_is_refused():
    content = to_dict(build_default_run())
    del content["parts"]["model"]
    with pytest.raises(UserError, match="does not choose a part for model"):
        from_dict(content)


def test_options_of_unselected_tracker_are_refused():
    content = to_dict(build_default_run(track=["jsonl"]))
    content["track"]["console"] = {}
    with pytest.raises(UserError, match=r"track\.console is set, but console is not chosen"):
        from_dict(content)


def test_environment_references_are_resolved_but_kept(monkeypatch):
    monkeypatch.setenv("PLACE", "sh-secret")
    monkeypatch.setenv("STEPS", "12")
    content = to_dict(build_default_run())
    content["run"]["name"] = "${oc.env:PLACE}"
    content["run"]["steps"] = "${oc.env:STEPS}"
    content["data"]["path"] = "/data/${oc.env:NOWHERE, fallback}"
    run = from_dict(content)
    assert (run.job.name, run.job.steps, run.data.path) == ("sh-secret", 12, "/data/fallback")
    assert to_dict(run) == content
    assert "sh-secret" not in yaml.safe_dump(to_dict(run))


def test_unset_environment_variable_is_named(monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    content = to_dict(build_default_run())
    content["run"]["name"] = "${oc.env:NOWHERE}"
    with pytest.raises(UserError, match="needs the environment variable NOWHERE"):
        from_dict(content)


# --- runs in plain Python ---


def test_python_run_accepts_names_configurations_and_dicts():
    run = build_default_run(model="gpt2-124m", optimizer=Adamw(learning_rate=1.0), run={"steps": 3}, track=["jsonl"])
    assert installed().find_part(run.model).part.name == "gpt2-124m"
    assert (run.optimizer.learning_rate, run.steps, list(run.track)) == (1.0, 3, ["jsonl"])


def test_a_configuration_in_the_wrong_group_is_refused():
    with pytest.raises(UserError, match="Adamw configures optimizer=adamw, not a schedule"):
        build_default_run(schedule=Adamw())


def test_an_unknown_group_is_refused():
    with pytest.raises(UserError, match="there is no group 'optimiser'"):
        build_default_run(optimiser="adamw")


def test_off_for_group_of_missing_plugin_is_accepted():
    assert build_default_run(moe="off") == build_default_run() == build_default_run(moe=False)


# --- values ---


class Shade(enum.Enum):
    dark = "dark"
    on = "on"


@dataclass
class Nested:
    size: int = 1
    names: list[str] = field(default_factory=list)


FITS: list[tuple[Any, Any, Any]] = [
    (int, 3, 3),
    (int, 1e3, 1000),
    (int, "12", 12),
    (float, 3, 3.0),
    (float, "1e-4", 1e-4),
    (float, "inf", math.inf),
    (bool, "on", True),
    (bool, "no", False),
    (bool, False, False),
    (str, 7, "7"),
    (str | None, None, None),
    (str | None, "null", "null"),
    (int | None, "3", 3),
    (str | int | None, 10, 10),
    (str | int | None, "auto", "auto"),
    (str | list[str] | None, ["a", "b"], ["a", "b"]),
    (list[int], ["1", 2], [1, 2]),
    (tuple[float, float], [1, 2], (1.0, 2.0)),
    (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
    (dict[str, float], {"a": 1}, {"a": 1.0}),
    (Literal["a", "b"], "b", "b"),
    (Literal["on", "off"], True, "on"),
    (Shade, "dark", Shade.dark),
    (Shade, True, Shade.on),
    (Path, "a/b", Path("a/b")),
    (Any, [1, {}], [1, {}]),
]
MISFITS: list[tuple[Any, Any, str]] = [
    (int, 1.5, "expected an integer, got 1.5"),
    (int, True, "expected an integer, got true"),
    (int, "many", "expected an integer, got 'many'"),
    (int, None, "expected an integer, got null"),
    (float, [1], r"expected a number, got \[1\]"),
    (bool, "maybe", "expected true or false, got 'maybe'"),
    (bool, 1, "expected true or false, got 1"),
    (str, ["a"], r"expected text, got \['a'\]"),
    (int | None, "x", "expected an integer or null, got 'x'"),
    (list[int], 3, "expected a list of integers, got 3"),
    (tuple[float, float], [1], "expected 2 values, got 1"),
    (Literal["a", "b"], "c", "expected a or b, got 'c'"),
    (Shade, "light", "expected dark or on, got 'light'"),
    (dict[str, int], [1], r"expected a mapping, got \[1\]"),
]


@pytest.mark.parametrize(("hint", "value", "wanted"), FITS, ids=str)
def test_valid_value_is_converted(hint, value, wanted):
    found = convert(hint, value)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(("hint", "value", "message"), MISFITS, ids=str)
def test_invalid_value_is_refused(hint, value, message):
    with pytest.raises(InvalidValue, match=message):
        convert(hint, value)


def test_to_plain_converts_enums_paths_and_dataclasses():
    assert to_plain({"a": (Shade.dark, Path("x")), "b": Nested(2, ["n"])}) == {
        "a": ["dark", "x"],
        "b": {"size": 2, "names": ["n"]},
    }


def test_types_are_described_in_words():
    assert describe(str | list[str] | None) == "text or a list of text or null"
    assert describe(list[float]) == "a list of numbers"
    assert describe(tuple[int, int]) == "a list of 2 integers"
    assert describe(tuple[int, ...]) == "a list of integers"
    assert describe(list[int | None]) == "a list of an integer or null"


@dataclass
class _Inner:
    words: list[str] = field(default_factory=lambda: ["a"])
    count: int = 1


@dataclass
class _Outer:
    inner: _Inner = field(default_factory=lambda: _Inner(["b", "c"], 2))


def test_partial_section_keeps_other_field_defaults():
    """Use a field whose default differs from the defaults of its class."""
    problems: list = []
    assert fill(_Outer, {"inner": {"count": 5}}, "outer", problems) == _Outer(_Inner(["b", "c"], 5))
    assert fill(_Outer, {}, "outer", problems) == _Outer(_Inner(["b", "c"], 2))
    assert problems == []
