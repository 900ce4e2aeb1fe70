"""`gangline new-plugin`: what it writes is small, installs and shows up; what cannot be is refused."""

import subprocess
import sys

import pytest
import yaml

from gangline.cli.new_plugin import KINDS, files, main, write
from gangline.errors import UserError
from gangline.testing import as_installed
from gangline.testing.report import run_file

SLOW = ("checkpoint", "strategy")  # suites with kills and many layouts


def code_lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def run(strangers, module: str, *words: str) -> str:
    done = strangers.run(module, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_smallest_plugin_is_small():
    written = files("mine", "tracker")
    assert code_lines(written["gangline_mine.py"]) <= 15
    assert code_lines(written["pyproject.toml"]) <= 12
    assert code_lines(written["tests/test_conformance.py"]) <= 5


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_shows_up_and_composes(kind, tmp_path, strangers):
    folder = write("my-own", kind, tmp_path)
    strangers.add("gangline-my-own", (folder / "gangline_my_own.py").read_text(), module="gangline_my_own")
    listed = run(strangers, "gangline.cli.main", "plugins")
    assert "gangline-my-own" in listed
    group, _, name = KINDS[kind].choice.format(name="my_own" if kind == "edit" else "my-own").partition("=")
    chosen = f"{group}=[{name}]" if group in ("track", "health") else f"{group}={name}"
    composed = run(strangers, "gangline.cli.train", chosen, "--cfg", "job")
    assert yaml.safe_load(composed)["parts"][group] in (name, [name])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly) if kind in SLOW else kind for kind in KINDS]
)
def test_each_kind_passes_its_suite(kind, tmp_path):
    """As written, with no line changed; `gangline conform` would print the same."""
    folder = write(f"my-{kind}", kind, tmp_path)
    with as_installed(f"gangline-my-{kind}", f"gangline_my_{kind}", path=folder):
        (result,) = run_file(folder / "tests" / "test_conformance.py")
    assert not result.failed
    assert not result.waived
    assert result.passed > 10


@pytest.mark.parametrize("name", ["Mine", "my_own", "1st", "-x", "a--b", ""])
def test_names_that_cannot_be(name, tmp_path):
    with pytest.raises(UserError, match="cannot be the name"):
        write(name, "tracker", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["mine"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="already here"):
        main(["gangline-mine"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("name", "kind"), [("torch", "checkpoint"), ("jsonl", "tracker"), ("ddp", "strategy")])
def test_parts_that_exist_are_named(name, kind, tmp_path):
    with pytest.raises(UserError, match="supplied by gangline"):
        write(name, kind, tmp_path)


def test_the_command_refuses_with_one_message(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "gangline.cli.main", "new-plugin", "No"], capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert "'No' cannot be the name of a plugin" in ran.stderr
