"""What SECURITY.md promises: nothing in a file that is read is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.config import compose_one
from gangline.config.recipes import read_recipe
from gangline.errors import UserError
from gangline.rundir import RunDirectory


@pytest.fixture
def call(tmp_path: Path) -> str:
    """YAML that would make a directory, were it more than data."""
    return f"!!python/object/apply:os.mkdir [{tmp_path / 'made'}]"


def test_a_recipe_calls_nothing(tmp_path: Path, call: str) -> None:
    recipe = tmp_path / "evil.yaml"
    recipe.write_text(f"run:\n  name: {call}\n")
    with pytest.raises(UserError, match=r"evil\.yaml cannot be read"):
        read_recipe(str(recipe))
    assert not (tmp_path / "made").exists()


def test_the_configuration_of_a_run_calls_nothing(tmp_path: Path, call: str) -> None:
    (tmp_path / "config.yaml").write_text(f"run:\n  name: {call}\n...\n")
    with pytest.raises(UserError, match="is not valid YAML"):
        RunDirectory(tmp_path).run()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "recipe",
    [
        "parts: {health: ['on']}\nhealth: {'on': {alert: touch made}}",
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
        "parts: {health: ['on']}\nhealth: {'on': {alert: 'https://host'}}",
        "parts: {launch: slurm}\nlaunch: {options: ['--reservation=night', '--gres=gpu:8']}",
        "parts: {callback: [eval]}\ncallback: {eval: {tasks: [hellaswag]}}",
    ],
)
def test_recipe_that_names_no_program_is_composed(tmp_path: Path, recipe: str) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(recipe)
    compose_one([f"recipe={file}"])
