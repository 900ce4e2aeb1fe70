"""What a release needs and no single package can hold: one licence, one extra that takes all, versions that agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {path.parent: tomllib.loads(path.read_text())["project"] for path in ROOT.glob("packages/*/pyproject.toml")}
WHOLE = PACKAGES[ROOT / "packages" / "gangline"]


@pytest.mark.parametrize("folder", sorted(PACKAGES), ids=lambda folder: folder.name)
def test_packages_have_licence_and_changelog_version(folder: Path) -> None:
    project = PACKAGES[folder]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    newest = re.search(r"^## (\S+)", (folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest, "the changelog has no version"
    assert newest[1] == project["version"]


def test_extra_all_installs_every_package() -> None:
    lines = [*WHOLE["dependencies"], *WHOLE["optional-dependencies"]["all"]]
    wanted = {re.split(r"[\[<>=~! ]", line)[0] for line in lines}
    assert wanted == {project["name"] for project in PACKAGES.values()} - {WHOLE["name"]}
