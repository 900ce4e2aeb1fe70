"""Composition of a run from overrides, lists, recipes, earlier runs and groups of plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gangline.config import Recompute
from gangline.config.compose import compose, compose_one
from gangline.config.defaults import build_default_run
from gangline.config.resume import continue_run
from gangline.config.serial import from_dict, to_dict
from gangline.errors import UserError
from gangline.plugin.registry import installed
from gangline.run.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("core_alone")


def names(run, group: str) -> str:
    return to_dict(run)["parts"][group]


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        compose_one(words)
    return str(caught.value)


def test_no_overrides_give_the_default_run():
    assert compose([]) == [build_default_run()]


def test_overrides_set_parts_and_values():
    run = compose_one(["optimizer=muon", "optimizer.learning_rate=1e-2", "run.steps=1e3", "run.recompute=full"])
    assert names(run, "optimizer") == "muon"
    assert (run.optimizer.learning_rate, run.steps, run.job.recompute) == (0.01, 1000, Recompute.full)


@pytest.mark.parametrize("word", ["run.deterministic=on", "run.deterministic=true", "run.deterministic=yes"])
def test_boolean_accepts_on_true_and_yes(word):
    assert compose_one([word]).deterministic is True


@pytest.mark.parametrize(
    ("word", "name"),
    [("run.name=1e5", "1e5"), ("run.name=007", "007"), ("run.name=true", "true"), ("run.name=a=b (c)", "a=b (c)")],
)
def test_run_name_like_a_number_stays_text(word, name):
    assert compose_one([word]).job.name == name


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("/a/*.txt", "/a/*.txt"),
        ("~/texts/x (1).txt", "~/texts/x (1).txt"),
        ("[a,b]", ["a", "b"]),
        ("'a,b'", "a,b"),
        (r"\d(1)", r"\d(1)"),
    ],
)
def test_paths_need_no_quoting(value, path):
    assert compose_one([f"data.path={value}"]).data.path == path


def test_option_values_may_interpolate_other_options():
    assert compose_one(["run.steps=7", "schedule.warmup_steps=${run.steps}"]).schedule.warmup_steps == 7


def test_list_group_accepts_several_parts():
    assert list(compose_one(["track=[jsonl,console]"]).track) == ["jsonl", "console"]
    assert list(compose_one(["track=jsonl"]).track) == ["jsonl"]
    assert compose_one(["track=[]"]).track == compose_one(["~track"]).track == {}
    run = compose_one(["track=[jsonl]", "track.jsonl.path=elsewhere"])
    assert run.track["jsonl"].path == "elsewhere"


def test_comma_separated_values_give_several_runs():
    runs = compose(["parallel=single,ddp", "run.seed=1,2", "track=[jsonl],[]", "run.steps=5"])
    assert len(runs) == 8
    assert {(names(run, "parallel"), run.seed, len(run.track)) for run in runs} == {
        (name, seed, count) for name in ("single", "ddp") for seed in (1, 2) for count in (0, 1)
    }
    assert {run.steps for run in runs} == {5}


def test_range_gives_several_runs():
    assert [run.seed for run in compose(["run.seed=range(0,3)"])] == [0, 1, 2]


# --- recipes and earlier runs ---


def test_tiny_recipe_is_the_default_run():
    run = compose_one(["recipe=tiny"])
    assert run == build_default_run(run={"name": "tiny"})


def test_overrides_take_precedence_over_recipe():
    run = compose_one(["run.steps=9", "recipe=tiny"])
    assert (run.job.name, run.steps) == ("tiny", 9)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    return tmp_path


def test_recipe_in_working_directory_is_found(here):
    (here / "configs" / "mine.yaml").write_text(
        "parts: {optimizer: muon, track: [jsonl], moe: off}\noptimizer: {learning_rate: 1e-4}\nrun: {steps: 3}\n"
    )
    run = compose_one(["recipe=mine"])
    assert (names(run, "optimizer"), run.optimizer.learning_rate, run.steps) == ("muon", 1e-4, 3)
    assert run == compose_one(["recipe=configs/mine.yaml"])


def test_replaced_part_drops_recipe_options(here):
    (here / "configs" / "mine.yaml").write_text(
        "parts: {optimizer: muon, track: [jsonl, console]}\noptimizer: {momentum: 0.5}\ntrack: {jsonl: {path: x}}\n"
    )
    run = compose_one(["recipe=mine", "optimizer=adamw", "track=[console]"])
    assert run == build_default_run(track=["console"])


def test_unquoted_yaml_on_and_off_are_part_names(here, adapter):
    (here / "configs" / "mine.yaml").write_text("parts:\n  checkpoint: off\n  adapter: on\n")
    run = compose_one(["recipe=mine"])
    assert names(run, "checkpoint") == "off"
    assert run.edits["adapter"].rank == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("defaults: [{model: tiny}]", "has a defaults list"),
        ("model: tiny", "model must be a mapping of options.\n  To choose a part, write  parts: {model: tiny}"),
        ("health: [on]", "health must be a mapping of options.\n  To choose a part, write  parts: {health: [on]}"),
        ("parts: {health: [on]}", "health=on is not available here"),
        ("optimiser: {}", "has an unknown key 'optimiser'.\n  Did you mean optimizer?"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "cannot be read"),
        ("parts: {model: tinny}", "model=tinny is not available here.\n  Did you mean model=tiny?"),
        ("optimizer: {momentum: 1}", "optimizer.momentum: optimizer=adamw has no such option."),
        ("run: {steps: many}", "run.steps=many: expected an integer, got 'many'."),
    ],
)
def test_invalid_recipe_is_refused(here, content, message):
    (here / "configs" / "bad.yaml").write_text(content)
    assert message in refused("recipe=bad")


def test_unknown_recipe_lists_available_recipes(here):
    (here / "configs" / "mine.yaml").write_text("run: {steps: 3}")
    message = refused("recipe=mne")
    assert "there is no recipe 'mne'" in message
    assert "Did you mean mine?" in message
    assert "Recipes: mine, quick, tiny." in message


@pytest.fixture
def earlier(here) -> RunDirectory:
    made = RunDirectory.create(
        compose_one(["optimizer=muon", "optimizer.learning_rate=0.5", "run.dir=out", "run.steps=4"])
    )
    made.unlock()
    return made


def test_from_option_copies_earlier_configuration(earlier):
    run = compose_one(["from=out", "run.steps=6"])
    assert (names(run, "optimizer"), run.optimizer.learning_rate, run.steps) == ("muon", 0.5, 6)
    assert run.job.dir is None


def test_resume_may_change_length_and_layout(earlier):
    words = [
        "run.steps=8",
        "parallel=ddp",
        "launch.processes=2",
        "track=[jsonl]",
        "checkpoint.every=3",
        "precision=bf16",
    ]
    run, changed = continue_run("out", earlier.read_content(), words)
    assert (run.steps, names(run, "parallel"), run.optimizer.learning_rate) == (8, "ddp", 0.5)
    assert changed["run.steps"] == [4, 8]
    assert changed["parallel"] == ["single", "ddp"]


def test_resume_accepts_a_new_data_path(earlier):
    run, changed = continue_run("out", earlier.read_content(), ["data.path=[texts,/more]"])
    assert changed == {"data.path": [None, [os.path.abspath("texts"), "/more"]]}
    assert run.data.path == ["texts", "/more"]


def test_resume_with_unchanged_settings_is_accepted(earlier):
    assert continue_run("out", earlier.read_content(), ["optimizer=muon", "run.seed=0"])[1] == {}


@pytest.mark.parametrize(
    "word",
    [
        "model=gpt2-124m",
        "run.seed=2",
        "batch.global_size=8",
        "optimizer=adamw",
        "data.document_masking=on",
        "run.dir=x",
    ],
)
def test_resume_refuses_changed_settings(earlier, word):
    with pytest.raises(UserError) as caught:
        continue_run("out", earlier.read_content(), [word])
    message = str(caught.value)
    assert message.startswith(f"a resumed run cannot change {word.partition('=')[0]}")
    assert "Options that may change: run.steps" in message
    assert f"train from=out {word}" in message


# --- third-party parts ---

LORA = """
from dataclasses import dataclass, field
from gangline import Part, hookimpl
from gangline.errors import Problem
from gangline.config.schema import EditConfig, PartConfig, TrackConfig

@dataclass
class Everywhere(PartConfig):
    skip: int = 0

@dataclass
class Some(PartConfig):
    names: list[str] = field(default_factory=list)

    def check(self, run):
        return [] if self.names else [Problem("adapter.site.names is empty.")]

@dataclass
class Lora(EditConfig):
    rank: int = 8  # of the added matrices
    site: PartConfig = field(default_factory=Everywhere)
    extra: dict[str, float] = field(default_factory=dict)

@dataclass
class Rain(PartConfig):
    millimetres: float = 1.0

@dataclass
class Drops(TrackConfig):
    pass

@hookimpl
def gangline_model_edits():
    yield Part(
        group="adapter", name="on", config=Lora, build="gangline_lora:edit", summary="Low", opens={"site": "all"}
    )

@hookimpl
def gangline_parts():
    yield Part(group="adapter/site", name="all", config=Everywhere, build="gangline_lora:site", summary="Everywhere")
    yield Part(group="adapter/site", name="some", config=Some, build="gangline_lora:site", summary="Here and there")
    yield Part(group="weather", name="rain", config=Rain, build="gangline_lora:rain", summary="A group that is no edit")

@hookimpl
def gangline_trackers():
    yield Part(name="drops", config=Drops, build="m:b", summary="Counts", reads=("weather",))

def edit(tree, plan, options):
    return tree, plan, ()
"""


@pytest.fixture
def adapter(strangers, monkeypatch):
    strangers.add("gangline-lora", LORA)
    monkeypatch.syspath_prepend(str(strangers.site))
    installed.cache_clear()
    yield
    installed.cache_clear()
    sys.modules.pop("gangline_lora", None)


def test_plugin_adds_group_without_core_change(adapter):
    run = compose_one(["adapter=on", "adapter.rank=4", "weather=rain"])
    assert run.edits["adapter"].rank == 4
    assert run.extra["weather"].millimetres == 1.0
    assert from_dict(to_dict(run)) == run


@pytest.mark.parametrize(
    ("word", "there"), [("adapter=true", True), ("adapter=off", False), ("adapter=false", False), ("~adapter", False)]
)
def test_edit_group_is_switched_on_and_off(adapter, word, there):
    assert ("adapter" in compose_one([word]).edits) is there


def test_nested_group_has_default_and_choices(adapter):
    assert type(compose_one(["adapter=on"]).edits["adapter"].site).__name__ == "Everywhere"
    run = compose_one(["adapter=on", "adapter/site=some", "adapter.site.names=[a,b]"])
    assert run.edits["adapter"].site.names == ["a", "b"]
    content = to_dict(run)
    assert content["parts"]["adapter/site"] == "some"
    assert from_dict(yaml.safe_load(yaml.safe_dump(content))) == run


def test_nested_group_without_parent_is_refused(adapter):
    assert refused("adapter/site=some").startswith("adapter/site=some: adapter is off.")
    assert "there is no option adapter.site.names." in refused("adapter=on", "adapter.site.names=[a]")
    assert "Did you mean adapter/site=some?" in refused("adapter=on", "adapter/site=som")


def test_options_of_disabled_group_are_refused(adapter):
    message = refused("adapter.rank=4")
    assert "adapter is off in this run; choose a part first:  adapter=<name>" in message
    assert "Installed choices for adapter: off, on." in message


def test_option_with_free_keys_accepts_any_key(adapter):
    assert compose_one(["adapter=on", "adapter.extra.alpha=2"]).edits["adapter"].extra == {"alpha": 2.0}


def test_a_recipe_of_a_plugin_is_found(adapter, strangers):
    package = strangers.site / "gangline_recipes"
    (package / "conf" / "recipe").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "conf" / "recipe" / "soft.yaml").write_text("# Soft.\nparts: {adapter: on}\n")
    info = strangers.site / "gangline_recipes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gangline-recipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gangline.v1]\nrecipes = gangline_recipes\n")
    installed.cache_clear()
    assert "adapter" in compose_one(["recipe=soft"]).edits


# --- secrets and environment ---

SECRETIVE = """
from dataclasses import dataclass
from gangline import Part, hookimpl
from gangline.config.schema import TrackConfig

@dataclass
class Cloud(TrackConfig):
    api_key: str | None = None

@hookimpl
def gangline_trackers():
    yield Part(name="cloud", config=Cloud, build="gangline_cloud:build", summary="Away")
"""


@pytest.fixture
def cloud(strangers, monkeypatch):
    strangers.add("gangline-cloud", SECRETIVE)
    monkeypatch.syspath_prepend(str(strangers.site))
    installed.cache_clear()
    yield
    installed.cache_clear()
    sys.modules.pop("gangline_cloud", None)


def test_secret_in_override_or_recipe_is_refused(cloud, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("parts: {track: [cloud]}\ntrack: {cloud: {api_key: sh-1234}}\n")
    for words in (["track=[cloud]", "track.cloud.api_key=sh-1234"], ["recipe=recipe.yaml"]):
        with pytest.raises(UserError) as caught:
            RunDirectory.create(compose_one([*words, "run.dir=out"]), ["train"])
        message = str(caught.value)
        assert "track.cloud.api_key contains a secret" in message
        assert "'track.cloud.api_key=${oc.env:API_KEY}'" in message
        assert "sh-1234" not in message
        assert not Path("out").exists()


def test_secret_from_environment_is_not_written(cloud, tmp_path, monkeypatch):
    monkeypatch.setenv("CLOUD_KEY", "sh-1234")
    run = compose_one(["track=[cloud]", "track.cloud.api_key=${oc.env:CLOUD_KEY}", f"run.dir={tmp_path}/out"])
    assert run.track["cloud"].api_key == "sh-1234"
    made = RunDirectory.create(run, ["train"])
    made.unlock()
    assert not [path for path in made.path.rglob("*") if path.is_file() and "sh-1234" in path.read_text()]
    assert made.run().track["cloud"].api_key == "sh-1234"


def test_environment_and_value_references_combine(monkeypatch):
    monkeypatch.setenv("SOMETHING", "there")
    run = compose_one(["run.steps=7", "run.name=${oc.env:SOMETHING}-${run.steps}", "data.path=/x/${run.name}"])
    assert (run.job.name, run.data.path) == ("there-7", "/x/there-7")
    content = to_dict(run)
    assert (content["run"]["name"], content["data"]["path"]) == ("${oc.env:SOMETHING}-7", "/x/${oc.env:SOMETHING}-7")


def test_composing_imports_no_torch():
    code = (
        "import sys; from gangline.config.compose import compose\n"
        "compose(['parallel=ddp']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
