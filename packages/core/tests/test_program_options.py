"""Options that hold a program: recipes and earlier runs cannot set them, only the command line can."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from gangline.config.compose import compose_one
from gangline.config.preflight import parse
from gangline.config.programs import explain_distrust
from gangline.config.resume import continue_run
from gangline.config.values import override
from gangline.errors import UserError, escape_controls
from gangline.plugin.registry import installed
from gangline.run.directory import RunDirectory

PLUGIN = """
from dataclasses import dataclass, field
from typing import Annotated
from gangline import Part, hookimpl
from gangline.config import RunsCode
from gangline.config.schema import TrackConfig

@dataclass
class Notify(TrackConfig):
    command: Annotated[str, RunsCode(data=lambda value: str(value).startswith("http://"))] = ""
    setup: Annotated[list[str], RunsCode()] = field(default_factory=list)

@hookimpl
def gangline_trackers():
    yield Part(name="notify", config=Notify, build="gangline_notify:build", summary="Runs a command")
"""


@pytest.fixture
def notify(core_alone, strangers, tmp_path, monkeypatch):
    strangers.add("gangline-notify", PLUGIN)
    monkeypatch.syspath_prepend(str(strangers.site))
    monkeypatch.chdir(tmp_path)
    installed.cache_clear()
    yield
    installed.cache_clear()
    sys.modules.pop("gangline_notify", None)


def recipe(**options: str) -> str:
    lines = "".join(f"    {name}: {value}\n" for name, value in options.items())
    Path("r.yaml").write_text(f"parts: {{track: [notify]}}\ntrack:\n  notify:\n{lines}")
    return "recipe=r.yaml"


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        compose_one(words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "typed"),
    [
        ("command", "touch x", "'track.notify.command=touch x'"),
        ("command", "'say \"it''s, $5\"'", None),
        ("command", "'${oc.env:HOME}'", "'track.notify.command=${oc.env:HOME}'"),
        ("command", "'${run.name}'", "track.notify.command=run"),
        ("setup", "[module load cuda, 'a, b']", '\'track.notify.setup=["module load cuda","a, b"]\''),
        ("command", "'http://x/${oc.env:HOME}'", "'track.notify.command=\"http://x/${oc.env:HOME}\"'"),
    ],
)
def test_recipe_with_program_requires_command_line_override(notify, option, value, typed):
    file = recipe(**{option: value})
    message = refused(file)
    assert f"recipe=r.yaml sets track.notify.{option}=" in message
    (line,) = [line for line in message.splitlines() if "repeat it on the command line:" in line]
    (word,) = shlex.split(line.partition("repeat it on the command line:")[2])
    assert typed is None or shlex.split(typed) == [word]
    compose_one([file, word])
    (line,) = [line for line in message.splitlines() if "remove the setting:" in line]
    (word,) = shlex.split(line.partition("remove the setting:")[2])
    assert not getattr(compose_one([file, word]).track["notify"], option)


def test_override_replaces_program_of_recipe(notify):
    assert compose_one([recipe(command="evil"), "track.notify.command=good"]).track["notify"].command == "good"


def test_program_override_that_interpolates_recipe_value_is_refused(notify):
    Path("r.yaml").write_text("run: {name: '$(touch x)'}\n")
    assert "$(touch x)" in refused("recipe=r.yaml", "track=[notify]", "track.notify.command=echo ${run.name}")


def test_recipe_with_url_or_empty_program_composes(notify):
    assert compose_one([recipe(command="http://host/x", setup="[]")]).track["notify"].command == "http://host/x"
    assert compose_one([recipe(command="''")]).track["notify"].command == ""


@pytest.mark.parametrize("option", ["run.name", "run.dir", "data.path"])
def test_recipe_may_not_read_the_environment(core_alone, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OWN", "secret")
    group, name = option.split(".")
    Path("r.yaml").write_text(f"{group}: {{{name}: 'x-${{oc.env:OWN}}'}}\n")
    message = refused("recipe=r.yaml")
    word = f'{option}="x-${{oc.env:OWN}}"'
    assert f"recipe=r.yaml sets {word}, which reads an environment variable" in message
    assert f"repeat it on the command line:  '{word}'" in message
    assert "secret" not in message
    compose_one(["recipe=r.yaml", word])


@pytest.mark.parametrize("word", ["track.notify.command=notify-send hi", "track.notify.setup=[module load x]"])
def test_from_option_needs_program_override_again(notify, word):
    RunDirectory.create(compose_one(["track=[notify]", word, "run.dir=out"])).unlock()
    assert "from=out sets track.notify" in refused("from=out")
    compose_one(["from=out", word])


def test_resume_runs_programs_of_trusted_directory_only(notify):
    word = "track.notify.command=notify-send hi"
    directory = RunDirectory.create(compose_one(["track=[notify]", word, "run.dir=out"]))
    directory.unlock()
    out = directory.path
    run, changed = continue_run(str(out), directory.read_content(), ["run.steps=500"])
    assert (run.track["notify"].command, list(changed)) == ("notify-send hi", ["run.steps"])
    for path in (out, out / "config.yaml"):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(UserError) as caught:
            continue_run(str(out), directory.read_content(), [])
        assert f"chmod go-w {path}" in str(caught.value)
        assert f"repeat it on the command line:  '{word}'" in str(caught.value)
        assert continue_run(str(out), directory.read_content(), [word])[1] == {}
        path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(out / "config.yaml", 65534, -1)
        assert explain_distrust(out) == f"{out / 'config.yaml'} belongs to another user."


TEXTS = st.text(alphabet="ab1 ,:=$'\"\\[]{}()~*#-\n.", max_size=8)


@given(TEXTS.filter(lambda text: "${" not in text) | st.lists(TEXTS.filter(lambda text: "${" not in text), max_size=3))
@example("null")
@example(["1e4", "true", ""])
def test_printed_override_parses_to_same_value(value):
    from hydra.core.override_parser.types import QuotedString

    def plain(read):
        return [plain(item) for item in read] if isinstance(read, list) else getattr(read, "text", read)

    (word,) = shlex.split(shlex.quote(override("a.b", value)))
    read = parse(word).value()
    assert plain(read) == value
    assert isinstance(read, str | list | QuotedString)


def test_control_characters_are_escaped():
    assert escape_controls("a\x1b]0;x\x07\n\u202eb\té") == "a\\x1b]0;x\\x07\n\\u202eb\té"


# --- environment ---


@pytest.mark.parametrize("name", ["${ oc.env:OWN}", "${\toc.env : OWN}", "${oc.env:OWN}"])
def test_config_keeps_environment_reference_with_any_spacing(monkeypatch, name):
    from gangline.config.serial import to_dict

    monkeypatch.setenv("OWN", "secret")
    run = compose_one([f"run.name={name}"])
    assert run.job.name == "secret"
    assert to_dict(run)["run"]["name"].replace(" ", "") == "${oc.env:OWN}"


@pytest.mark.parametrize("words", [["run.name=oc.env", "data.path=${${run.name}:OWN}"]])
def test_nested_environment_interpolation_is_refused(monkeypatch, words):
    monkeypatch.setenv("OWN", "secret")
    with pytest.raises(UserError, match=r"must be spelled \$\{oc.env:NAME\}") as caught:
        compose_one(words)
    assert "secret" not in str(caught.value)
