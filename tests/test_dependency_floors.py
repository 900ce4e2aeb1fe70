"""Minimum versions of dependencies that read external files: versions with known vulnerabilities are excluded."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = sorted((Path(__file__).parents[1] / "packages").glob("*/pyproject.toml"))
FLOORS = {
    "fsspec": (2026, 6),  # from here on, reference:// renders templates in a sandbox (fsspec 2039)
    "s3fs": (2026, 6),
    "jinja2": (3, 1, 6),  # CVE-2025-27516, CVE-2024-56326: sandbox escapes
    "pillow": (10, 3),  # CVE-2023-4863, CVE-2024-28219: buffer overflows in decoders
    "pyarrow": (14, 0, 1),  # CVE-2023-47248: code execution from Parquet and IPC files
}


def requirements(path: Path) -> Iterator[str]:
    content = tomllib.loads(path.read_text())
    yield from content["project"].get("dependencies", [])
    for group in ("optional-dependencies", "dependency-groups"):
        for listed in {**content["project"], **content}.get(group, {}).values():
            yield from (one for one in listed if isinstance(one, str))


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.name)
def test_dependency_floors_exclude_known_vulnerabilities(path):
    for requirement in requirements(path):
        name, _, version = requirement.partition(">=")
        floor = FLOORS.get(name.partition("[")[0])
        if floor is not None:
            assert tuple(map(int, version.partition(",")[0].split("."))) >= floor, requirement
