"""`gangline schema`: JSON schema with which editors check config.yaml and recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from gangline.cli.main import main
from gangline.cli.train import main as train
from gangline.config.command_line import list_options
from gangline.config.fields import REQUIRED, get_defaults
from gangline.config.recipes import find_recipes, read_recipe
from gangline.errors import UserError
from gangline.plugin.hooks import GROUPS, LISTS
from gangline.plugin.registry import installed
from gangline_basics.json_schema import run_schema
from gangline_testkit import as_installed

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(json.dumps(run_schema(), allow_nan=False))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def mistakes(validator: Draft202012Validator, content: Any) -> list[str]:
    """Return the path of each mistake. Keys of mappings become strings, as in JSON."""
    return [".".join(map(str, error.absolute_path)) for error in validator.iter_errors(json.loads(json.dumps(content)))]


def test_command_prints_the_schema(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(run_schema()))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["optimizer=muon", "track=[jsonl]", "checkpoint.every=auto", "batch.ramp={4: 8}", "run.recompute=selective"],
        ["moe=on", "moe/router=softmax", "lora=on", "callback=[ema]", "validate.sets={code: {path: src}, old: null}"],
    ],
)
def test_printed_configuration_is_valid(validator, words, capsys):
    assert train(["--cfg", "job", *words]) == 0
    assert mistakes(validator, yaml.safe_load(capsys.readouterr().out)) == []


def test_every_recipe_is_valid(validator):
    names = [*find_recipes(), *map(str, CONFIGS.glob("*.yaml"))]
    assert len(names) > 5
    assert {name: found for name in names if (found := mistakes(validator, read_recipe(name)))} == {}


def test_default_options_of_every_part_are_valid(validator):
    for group in installed().list_groups():
        for name, offer in installed().get_offers(group).items():
            options = get_defaults(offer.part.config).items()  # an opened group has its own parts and options
            given = {key: value for key, value in options if value != REQUIRED and key not in offer.part.opens}
            if group in LISTS:
                content = {"parts": {group: [name]}, group: {name: given}}
            elif "/" in group:
                outer, inner = group.split("/")
                content = {"parts": {group: name}, outer: {inner: given}}
            else:
                content = {"parts": {group: name}, group: given}
            if group in GROUPS or group in installed().edit_groups():
                assert mistakes(validator, content) == [], f"{group}={name}"


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"run": {"steps": 0}}, "run.steps"),
        ({"run": {"step": 1}}, "run"),
        ({"run": {"recompute": "ful"}}, "run.recompute"),
        ({"batch": {"micro_size": "large"}}, "batch.micro_size"),
        ({"modl": {}}, ""),
        ({"parts": {"model": "tny"}}, "parts.model"),
        ({"parts": {"track": ["consol"]}}, "parts.track.0"),
        ({"track": {"console": {"every": 0}}}, "track.console.every"),
        ({"optimizer": {"momentum": 0.5}}, "optimizer"),  # an option of muon; the default is adamw
        ({"parts": {"optimizer": "muon"}, "optimizer": {"momentum": 1.0}}, "optimizer.momentum"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas"),
        ({"parts": {"moe": "on"}, "moe": {"router": {"no_option": 1}}}, "moe.router"),
        ({"moe": {"no_option": 1}}, "moe"),
        ({"moe": {"router": {"no_option": 1}}}, "moe.router"),
        ({"validate": {"sets": {"code": {"no_option": 1}}}}, "validate.sets.code"),
        ({"parts": {"moe/router": "softmax"}, "moe": {"router": {"no_option": 1}}}, "moe.router"),
    ],
)
def test_schema_error_names_path_of_invalid_value(validator, content, place):
    assert mistakes(validator, content) == [place]


@pytest.mark.parametrize(
    "content",
    [
        {"parts": None, "optimizer": {"betas": [0.9, 0.95]}},
        {"moe": {"experts": 8, "router": {"z_loss": 0.1}}},
    ],
)
def test_schema_accepts_missing_part_choice(validator, content):
    assert mistakes(validator, content) == []


def test_part_with_unreadable_options_is_left_out(tmp_path, capsys):
    source = """
from dataclasses import dataclass
from gangline import Part, hookimpl
from annotated_types import IsNotNan
from gangline.config import TrackConfig

@dataclass
class Odd(TrackConfig):
    level: "Undefined" = None

@dataclass
class Low(TrackConfig):
    level: IsNotNan[float] = float("-inf")

@hookimpl
def gangline_trackers():
    yield Part(name="odd", config=Odd, build="a:b", summary="Odd")
    yield Part(name="low", config=Low, build="a:b", summary="Low")
"""
    (tmp_path / "gangline_odd.py").write_text(source)
    with as_installed("gangline-odd", "gangline_odd", path=tmp_path):
        assert main(["schema"]) == 0
        printed = capsys.readouterr()
        assert "gangline schema: note: the schema omits track=odd of gangline-odd 0.0: " in printed.err
        schema = json.loads(printed.out, parse_constant=pytest.fail)
        assert "low" in schema["properties"]["track"]["properties"]
        assert "odd" not in schema["properties"]["track"]["properties"]
        with pytest.raises(UserError, match=r"the type of the option level of gangline_odd.Odd cannot be resolved"):
            list_options(["track=[odd]"])


def test_schema_accepts_interpolation_for_any_value(validator):
    assert mistakes(validator, {"run": {"steps": "${batch.global_size}", "seed": "${oc.env:SEED}"}}) == []


def test_option_has_its_help_and_default(validator):
    steps = validator.schema["properties"]["run"]["properties"]["steps"]
    assert steps["description"] == "length of the run in optimizer steps (at least 1)"
    assert (steps["default"], steps["anyOf"][0]) == (300, {"type": "integer", "minimum": 1})


def test_schema_includes_third_party_parts():
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        schema = run_schema()
    assert "apart" in schema["properties"]["parts"]["properties"]["parallel"]["enum"]
    validator = Draft202012Validator(schema)
    assert mistakes(validator, {"parts": {"parallel": "apart"}, "parallel": {"every": 2}}) == []
    assert mistakes(validator, {"parts": {"parallel": "apart"}, "parallel": {"every": 0}}) == ["parallel.every"]
