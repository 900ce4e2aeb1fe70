"""SECURITY.md: recipes, run configurations and other files that are read execute no code."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path

import pytest

from gangline.config.compose import compose_one
from gangline.config.defaults import build_default_run
from gangline.config.recipes import read_recipe
from gangline.errors import UserError
from gangline.record import read_records
from gangline.run.directory import RunDirectory
from gangline.run.events import read_events
from gangline_basics.data.config import TextConfig
from gangline_basics.runs.listing import read_summary
from gangline_health.live.status import RunFollower


@pytest.fixture
def call(tmp_path: Path) -> str:
    """Return YAML that creates the directory `made` if a reader executes it."""
    return f"!!python/object/apply:os.mkdir [{tmp_path / 'made'}]"


def test_recipe_yaml_executes_no_code(tmp_path: Path, call: str) -> None:
    recipe = tmp_path / "evil.yaml"
    recipe.write_text(f"run:\n  name: {call}\n")
    with pytest.raises(UserError, match=r"evil\.yaml cannot be read"):
        read_recipe(str(recipe))
    assert not (tmp_path / "made").exists()


def test_run_configuration_yaml_executes_no_code(tmp_path: Path, call: str) -> None:
    (tmp_path / "config.yaml").write_text(f"run:\n  name: {call}\n...\n")
    with pytest.raises(UserError, match="is not valid YAML"):
        RunDirectory(tmp_path).run()
    assert not (tmp_path / "made").exists()


LOL = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))
HOSTILE = {
    "aliases": (f"{LOL}run: {{name: x}}\n", "alias *a is not supported; write its value there"),
    "depth": (f"run: {{name: {'[' * 500}{']' * 500}}}\n", "more than 64 levels of nesting"),
    "greater depth": (f"run: {{name: {'[' * 3000}{']' * 3000}}}\n", "nesting"),  # PyYAML 6.0.4 has its own limit
    "itself": ("run: &a {name: *a}\n", "alias *a is not supported"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_yaml_of_unbounded_cost_is_refused(tmp_path: Path, kind: str) -> None:
    text, why = HOSTILE[kind]
    recipe = tmp_path / "evil.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError, match="cannot be read") as caught:
        read_recipe(str(recipe))
    assert why in str(caught.value)
    (tmp_path / "config.yaml").write_text(text + "...\n")
    with pytest.raises(UserError, match="is not valid YAML") as caught:
        RunDirectory(tmp_path).run()
    assert why in str(caught.value)


def test_recipe_larger_than_a_megabyte_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "evil.yaml"
    recipe.write_text(f"run: {{name: {'x' * 3_000_000}}}\n")
    with pytest.raises(UserError, match="has 3000014 bytes; the maximum is 1048576"):
        read_recipe(str(recipe))


def test_deeply_nested_line_of_run_is_skipped(tmp_path: Path) -> None:
    good, deep = '{"step": 1, "event": "x", "loss": "x"}\n', "[" * 3000 + "]" * 3000 + "\n"
    for name in ("metrics.jsonl", "events.jsonl", "attempts.jsonl"):
        (tmp_path / name).write_text(deep + good + deep)
    (tmp_path / "ending.json").write_text(deep)
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl", print)] == [1]
    assert [event["event"] for event in read_events(tmp_path)] == ["x"]
    assert read_summary(tmp_path).step == 1
    status = RunFollower(tmp_path).look()
    assert status.record is not None
    assert math.isnan(status.losses[0])


def test_list_shared_by_two_options_round_trips(tmp_path: Path) -> None:
    twice = ["a", "b"]
    run = build_default_run(run={"dir": str(tmp_path / "out")}, data=TextConfig(path=twice))
    run.validate.sets = {"x": {"path": twice}, "y": {"path": twice}}
    RunDirectory.create(run).unlock()
    assert RunDirectory.open(tmp_path / "out").run().validate.sets["y"]["path"] == [os.path.abspath(p) for p in twice]


@pytest.mark.parametrize(
    "recipe",
    [
        "parts: {health: [monitors]}\nhealth: {monitors: {alert: touch made}}",
        "parts: {launch: slurm}\nlaunch: {setup: [touch made]}",
        "parts: {launch: slurm}\nlaunch: {image: registry/evil}",
        "parts: {launch: slurm}\nlaunch: {mounts: ['/evil:/usr/lib/python3']}",
        "parts: {launch: slurm}\nlaunch: {options: ['--export=BASH_ENV=/evil']}",
        "parts: {launch: kubernetes}\nlaunch: {setup: [touch made]}",
        "parts: {launch: kubernetes}\nlaunch: {image: registry/evil}",
        "parts: {callback: [eval]}\ncallback: {eval: {files: [evil.yaml]}}",
        "parts: {callback: [eval]}\ncallback: {eval: {tasks: [evil.yaml]}}",
    ],
)
def test_recipe_that_names_a_program_is_refused(tmp_path: Path, recipe: str) -> None:
    file = tmp_path / "evil.yaml"
    file.write_text(recipe)
    with pytest.raises(UserError, match="which runs as a program"):
        compose_one([f"recipe={file}"])


@pytest.mark.parametrize(
    "recipe",
    [
        "parts: {health: [monitors]}\nhealth: {monitors: {alert: 'https://host'}}",
        "parts: {launch: slurm}\nlaunch: {options: ['--reservation=night', '--gres=gpu:8']}",
        "parts: {callback: [eval]}\ncallback: {eval: {tasks: [hellaswag]}}",
    ],
)
def test_recipe_that_names_no_program_is_composed(tmp_path: Path, recipe: str) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(recipe)
    compose_one([f"recipe={file}"])
