"""Fixtures: a headless Chromium, and reports of real runs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from chromium import fetch, make_environment
from devtools import Page

from gangline_basics.runs.report.command import main as report
from gangline_testkit import RealRuns

CACHE = Path(os.environ.get("GANGLINE_BROWSER_CACHE", Path.home() / ".cache" / "gangline-browser"))
EVIL = "</title><script>document.title = 'injected'</script><img src=x onerror=\"document.title='injected'\">"


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of a headless Chromium, which is downloaded if it is missing."""
    folder = fetch(CACHE)
    profile = tmp_path_factory.mktemp("profile")
    with Page([str(folder / "chromium")], profile, make_environment(folder)) as opened:
        yield opened


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a run, of a run with hostile text, and of both."""
    directory = tmp_path_factory.mktemp("reports")
    with RealRuns(directory, settings=()) as runs:
        runs.train("run.dir=plain", "recipe=quick", "track=[console,jsonl]")
    shutil.copytree(directory / "plain", directory / "hostile")
    config = directory / "hostile" / "config.yaml"
    config.write_text(config.read_text().replace("name: quick", f"name: {EVIL!r}"))
    metrics = directory / "hostile" / "metrics.jsonl"
    name = EVIL.replace("\\", "\\\\").replace('"', '\\"')
    metrics.write_text(
        metrics.read_text().replace('"metrics": {}', f'"metrics": {{"{name}": 1.0, "a/{"x" * 300}": 2.0}}')
    )
    for words in (["plain"], ["hostile"], ["plain", "hostile", "--out", str(directory / "both.html")]):
        assert report([str(directory / word) if word in ("plain", "hostile") else word for word in words]) == 0
    return {
        "plain": directory / "plain" / "report.html",
        "hostile": directory / "hostile" / "report.html",
        "both": directory / "both.html",
    }
