"""`gangline new-plugin`: short generated plugins that install, compose and pass their suite; refused names."""

import subprocess
import sys
import sysconfig

import pytest
import yaml

import gangline_testkit
from gangline.errors import UserError
from gangline.plugin.hooks import LISTS
from gangline_testkit import as_installed
from gangline_testkit.kinds import KINDS
from gangline_testkit.new_plugin import list_choices, main, make_files, write
from gangline_testkit.report import run_file

SLOW = ("checkpoint", "strategy", "optimizer", "edit", "callback")  # these suites kill processes or use many layouts


def code_lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def run(strangers, module: str, *words: str) -> str:
    done = strangers.run(module, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tracker_plugin_template_is_short():
    written = make_files("mine", "tracker")
    assert code_lines(written["gangline_mine.py"]) <= 15
    assert code_lines(written["pyproject.toml"]) <= 12
    assert code_lines(written["tests/test_conformance.py"]) <= 5


def test_all_plugin_kinds_install_and_compose_together(tmp_path, strangers):
    made = {kind: f"my-{kind.name}" for kind in KINDS}
    for kind, name in made.items():
        folder = write(name, kind.name, tmp_path)
        strangers.add_files(f"gangline-{name}", folder)
    listed = run(strangers, "gangline.cli.main", "plugins")
    assert "Cannot be used" not in listed
    words, verbs = [], []
    for kind, name in made.items():
        choice = list_choices(name, kind)[0]
        group, _, part = choice.partition("=")
        if part:
            words.append(f"{group}=[{part}]" if group in LISTS else choice)
            assert f"gangline-{name}" in listed
        else:
            verbs.append(choice.removeprefix("gangline "))
    assert verbs == ["my-command"]
    assert "usage: gangline my-command" in run(strangers, "gangline.cli.main", "my-command", "--help")
    parts = yaml.safe_load(run(strangers, "gangline.cli.train", *words, "--cfg", "job"))["parts"]
    for word in words:
        group, _, part = word.partition("=")
        assert parts[group] == (yaml.safe_load(part) if group in LISTS else part)


def test_kinds_are_listed(capsys):
    assert main(["--kinds"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][: len(KINDS)] == [k.name for k in KINDS]


def test_every_suite_has_a_plugin_kind():
    suites = {kind.suite.partition(":")[2] for kind in KINDS}
    assert suites == {name for name in gangline_testkit.__all__ if name.endswith("Suite")}


@pytest.mark.parametrize(
    "kind", [pytest.param(k.name, marks=pytest.mark.nightly) if k.name in SLOW else k.name for k in KINDS]
)
def test_generated_plugin_passes_conformance_suite(kind, tmp_path):
    """Run the generated suite with no line changed, as `gangline conform` does."""
    folder = write(f"my-{kind}", kind, tmp_path)
    with as_installed(f"gangline-my-{kind}", f"gangline_my_{kind}", path=folder):
        results = run_file(folder / "tests" / "test_conformance.py")
    assert len(results) == (2 if kind == "group" else 1)
    for result in results:
        assert not result.failed
        assert not result.waived
        assert result.passed >= (3 if kind == "command" else 10)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_each_kind_passes_tests_after_pip_install(kind, tmp_path):
    """Install each plugin into a new virtual environment that also sees the packages installed here, such as torch."""
    folder, site = write(f"my-{kind}", kind, tmp_path), sysconfig.get_path("purelib")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (own,) = (tmp_path / "venv").glob("lib/*/site-packages")
    (own / "of_the_tests.pth").write_text(f"import site; site.addsitedir({site!r})\n")

    def does(*words: str) -> str:
        done = subprocess.run([python, "-m", *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    does("pip", "install", "-q", "-e", ".")
    if kind != "command":
        assert f"gangline-my-{kind}" in does("gangline.cli.main", "plugins")
    assert "passed" in does("pytest", "-q", "-p", "no:cacheprovider")
    assert f"my-{kind}" in does("gangline.cli.main", "conform", f"gangline-my-{kind}", "--markdown").replace("_", "-")


@pytest.mark.parametrize("name", ["Mine", "my_own", "1st", "-x", "a--b", ""])
def test_invalid_plugin_names_are_refused(name, tmp_path):
    with pytest.raises(UserError, match="is not a valid plugin name"):
        write(name, "tracker", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_existing_plugin_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["mine"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="already exists"):
        main(["gangline-mine"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("name", "kind"), [("torch", "checkpoint"), ("jsonl", "tracker"), ("ddp", "strategy"), ("cosine", "schedule")]
)
def test_existing_part_names_are_refused(name, kind, tmp_path):
    with pytest.raises(UserError, match="supplied by gangline"):
        write(name, kind, tmp_path)


def test_new_plugin_command_refuses_invalid_name_without_traceback(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "gangline.cli.main", "new-plugin", "No"], capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert "'No' is not a valid plugin name" in ran.stderr
