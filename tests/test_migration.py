"""Migration tables: `train` answers every option of another framework with the Gangline option to type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gangline.cli.train import main

PAGES = sorted((Path(__file__).parent.parent / "docs" / "migrate").glob("*.md"))
ROWS = [
    (page.stem, theirs, ours)
    for page in PAGES
    for names, ours in re.findall(r"^\| ((?:`[^`]+` ?)+)\| `([^`]+)` \|", page.read_text(), re.MULTILINE)
    for theirs in re.findall("`([^`]+)`", names)
]


def test_migration_pages_have_option_tables():
    assert {name for name, *_ in ROWS} == {"deepspeed", "hugging-face-trainer", "megatron", "names", "torchtitan"}
    assert len(ROWS) > 200


@pytest.mark.parametrize(("page", "theirs", "ours"), ROWS, ids=lambda word: word)
def test_option_of_another_framework_suggests_gangline_option(
    page: str, theirs: str, ours: str, capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forms = [[f"{theirs}=2"]] if not theirs.startswith("--") else [[theirs, "2"], [f"{theirs}=2"]]
    if page in ("hugging-face-trainer", "names"):
        forms += [[f"--{theirs}", "2"]]
    for form in forms:
        known = f"{theirs}=" == f"{ours}=" or theirs == ours
        assert main(form) == 2 or known
        said = capsys.readouterr().err
        assert known or ours in said, f"train {' '.join(form)}\n{said}"
    assert not list(tmp_path.iterdir())


def test_readme_and_options_link_names_of_peers() -> None:
    for page, link in (("README.md", "docs/migrate/names.md"), ("docs/options.md", "migrate/names.md")):
        assert f"]({link})" in (Path(__file__).parent.parent / page).read_text()
