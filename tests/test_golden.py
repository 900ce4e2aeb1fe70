"""Recipes expanded with all defaults, compared with golden files.

The diff of a golden file shows a reviewer the effect of a change.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gangline.config.check import find_problems
from gangline.config.compose import compose_one

ROOT = Path(__file__).parent.parent
COMMAND = "python configs/regenerate.py"


def _regenerate():
    spec = importlib.util.spec_from_file_location("regenerate", ROOT / "configs" / "regenerate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


regenerate = _regenerate()
EXPANDED = regenerate.expanded()
RECIPES = sorted(set(EXPANDED) - {regenerate.DEFAULT, *regenerate.PUBLISHED})  # PUBLISHED need data


def test_golden_files_match_list_of_recipes():
    kept = {path.stem for path in regenerate.GOLDEN.glob("*.yaml")}
    assert kept == set(EXPANDED), f"regenerate with:  {COMMAND}"


@pytest.mark.parametrize("name", EXPANDED)
def test_a_run_expands_to_its_golden_file(name):
    golden = (regenerate.GOLDEN / f"{name}.yaml").read_text()
    assert EXPANDED[name] == golden, f"if the change is meant, regenerate with:  {COMMAND}"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_started(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert find_problems(compose_one([f"recipe={name}", "run.device=cpu"])) == []  # on any machine


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_is_short_and_opens_with_summary(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[0].endswith(".")
    assert len(lines) <= 40


def test_beginner_recipes_ship_in_wheel():
    import gangline_basics

    shipped = {path.stem for path in (Path(gangline_basics.__file__).parent / "conf" / "recipe").glob("*.yaml")}
    assert {"tiny", "quick"} <= shipped
