"""What SECURITY.md promises: nothing in a file that is read is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

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
