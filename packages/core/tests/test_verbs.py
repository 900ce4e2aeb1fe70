"""Subcommands: help, arguments, suggestions for unknown commands, imports."""

from __future__ import annotations

import sys

import pytest

from gangline import UserError
from gangline.cli.verbs import run_verb

VERBS = {"show": "what is there", "burn-in": "every rank", "import": "from a file"}


def test_help_lists_commands_and_paragraph(capsys):
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert run_verb("thing", VERBS, {}, argv, "More.") == 0
        page = capsys.readouterr().out
        assert page.startswith("usage: gangline thing VERB ...\n\n  show     what is there\n")
        assert "\nMore.\nFor the options of a verb:  gangline thing VERB --help" in page


def test_command_receives_its_arguments():
    assert run_verb("thing", VERBS, {"show": len}, ["show", "a", "b"]) == 2


def test_unknown_command_suggests_nearest():
    with pytest.raises(UserError) as caught:
        run_verb("thing", VERBS, {}, ["shwo"])
    assert str(caught.value).splitlines() == [
        "there is no gangline thing shwo.",
        "  Did you mean show?",
        "  Choices: show, burn-in, import.",
    ]


@pytest.mark.parametrize(("verb", "module"), [("show", "show"), ("burn-in", "burn_in"), ("import", "import_")])
def test_command_of_package_imports_its_module(tmp_path, monkeypatch, verb, module):
    (tmp_path / "verbs_here").mkdir()
    (tmp_path / "verbs_here" / "__init__.py").touch()
    (tmp_path / "verbs_here" / f"{module}.py").write_text("def run(argv): return len(argv)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run_verb("thing", VERBS, "verbs_here", [verb, "a"]) == 1
    for name in [name for name in sys.modules if name.startswith("verbs_here")]:
        del sys.modules[name]
