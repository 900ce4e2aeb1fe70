"""Release checks across packages: one licence, the extra `all`, matching versions, container file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

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


def test_citation_has_version_and_licence_of_release() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == WHOLE["version"]
    assert cited["license"] == WHOLE["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)


def test_container_copies_and_installs_existing_paths() -> None:
    text = (ROOT / "Containerfile").read_text()
    python = re.search(r"^FROM \S+/python:(3\.\d+)-slim$", text, re.MULTILINE)
    assert python, "the base image is no Python"
    assert python[1] in ("3.11", "3.12", "3.13")
    copied = [line.split()[1] for line in text.splitlines() if line.startswith("COPY ")]
    assert copied == ["constraints.txt", "packages"]
    assert all((ROOT / path).exists() for path in copied)
