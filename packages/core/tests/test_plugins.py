"""Plugin discovery: found parts, name clashes, broken plugins, messages. Each environment is a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

import gangline.config
from gangline.config.schema import Run
from gangline.errors import UserError
from gangline.plugin import catalogue
from gangline.plugin.hooks import BY_GROUP, GROUPS, HOOKS, LISTS, SINGLE
from gangline.plugin.registry import OFF, build, installed, load

pytestmark = pytest.mark.usefixtures("core_alone")

CHECKPOINT = """
from dataclasses import dataclass
from gangline import Part, hookimpl
from gangline.config.schema import CheckpointConfig

@dataclass
class Config(CheckpointConfig):
    depth: int = 3

@hookimpl
def gangline_checkpointers():
    return [Part(name="{name}", config=Config, build="{module}:build", summary="Keeps things")]

def build(config, run, store):
    return ("built", config.depth)
"""

EXITING_HOOK = """
from gangline import hookimpl

@hookimpl
def gangline_checkpointers():
    raise SystemExit(0)
"""

ASK = """
import json, sys
from gangline.errors import UserError
from gangline.plugin.registry import installed
found = installed()
said = {}
for choice in sys.argv[1:]:
    try:
        found.refuse_clashes()
        said[choice] = found.find(*choice.split("=")).supplier
    except UserError as error:
        said[choice] = str(error)
print(json.dumps({
    "said": said,
    "failures": [[f.supplier, f.why, f.fix] for f in found.failures],
    "clashes": found.clashes,
    "offers": {group: sorted(found.get_offers(group)) for group in found.list_groups()},
    "edits": sorted(found.edit_groups()),
    "torch": "torch" in sys.modules,
}))
"""


def checkpointer(name: str, module: str) -> str:
    return CHECKPOINT.format(name=name, module=module)


def ask(strangers, *choices: str, plugins: str | None = None) -> dict:
    """Return the parts, failures and messages that a process with these distributions on its path finds."""
    environment = {key: value for key, value in os.environ.items() if key != "GANGLINE_PLUGINS"} | strangers.environment
    if plugins is not None:
        environment["GANGLINE_PLUGINS"] = plugins
    command = [sys.executable, "-c", ASK, *choices]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
    return json.loads(done.stdout)


def test_plugin_is_found_without_importing_torch(strangers):
    strangers.add("gangline-deep", checkpointer("deep", "gangline_deep"), version="2.5.1")
    found = ask(strangers, "checkpoint=deep")
    assert found["said"] == {"checkpoint=deep": "gangline-deep 2.5.1"}
    assert "deep" in found["offers"]["checkpoint"]
    assert found["failures"] == []
    assert found["torch"] is False


def test_plugins_with_same_name_are_refused(strangers):
    strangers.add("gangline-one", checkpointer("one", "gangline_one"), plugin="deep", version="1.0")
    strangers.add("gangline-two", checkpointer("two", "gangline_two"), plugin="deep", version="2.0")
    found = ask(strangers, "checkpoint=torch")
    said = found["said"]["checkpoint=torch"]
    assert "two installed packages claim the plugin name 'deep': gangline-one 1.0, gangline-two 2.0." in said
    assert "GANGLINE_PLUGINS=basics,testkit,gangline-one" in said
    assert not {"one", "two"} & set(found["offers"]["checkpoint"])


def test_two_defaults_of_one_group_are_refused(strangers):
    deep = checkpointer("deep", "gangline_deep").replace("summary=", "default=True, summary=")
    strangers.add("gangline-deep", deep, version="2.5.1")
    said = ask(strangers, "checkpoint=torch")["said"]["checkpoint=torch"]
    assert "two installed packages have a default part of the group checkpoint" in said
    assert "gangline-basics" in said
    assert "gangline-deep 2.5.1 (deep)" in said
    alone = ask(strangers, "checkpoint=deep", plugins="gangline-deep")
    assert alone["said"] == {"checkpoint=deep": "gangline-deep 2.5.1"}


def test_plugins_variable_resolves_name_clash(strangers):
    strangers.add("gangline-one", checkpointer("one", "gangline_one"), plugin="deep")
    strangers.add("gangline-two", checkpointer("two", "gangline_two"), plugin="deep")
    found = ask(strangers, "checkpoint=two", plugins="gangline-two")
    assert found["said"] == {"checkpoint=two": "gangline-two 0.1.0"}
    assert found["clashes"] == []


def test_plugin_named_gangline_is_refused(strangers):
    strangers.add("gangline-impostor", checkpointer("deep", "gangline_impostor"), plugin="gangline")
    found = ask(strangers, "checkpoint=torch")
    assert "gangline itself" in found["said"]["checkpoint=torch"]
    assert "gangline-impostor 0.1.0" in found["said"]["checkpoint=torch"]


def test_parts_with_same_name_are_refused(strangers):
    strangers.add("gangline-one", checkpointer("deep", "gangline_one"), version="1.0")
    strangers.add("gangline-two", checkpointer("deep", "gangline_two"), version="2.0")
    said = ask(strangers, "checkpoint=deep")["said"]["checkpoint=deep"]
    assert "two installed packages offer checkpoint=deep: gangline-one 1.0, gangline-two 2.0." in said
    assert "Uninstall one" in said


def test_part_with_core_name_is_refused(strangers):
    strangers.add("gangline-one", checkpointer("torch", "gangline_one"))
    said = ask(strangers, "checkpoint=torch")["said"]["checkpoint=torch"]
    assert "offer checkpoint=torch: gangline-basics 0" in said
    assert "gangline-one 0.1.0" in said


def test_broken_plugin_fails_only_when_chosen(strangers):
    strangers.add("gangline-ckpt-zarr", "import no_such_module\n", requires="no-such-module>=3.1 ; extra == 'x'")
    found = ask(strangers, "checkpoint=torch", "checkpoint=zarr")
    assert found["said"]["checkpoint=torch"].startswith("gangline-basics ")
    said = found["said"]["checkpoint=zarr"]
    assert said.splitlines()[0] == "checkpoint=zarr is not available here."
    assert "gangline-ckpt-zarr 0.1.0 is installed but failed to import: ModuleNotFoundError" in said
    assert "gangline-ckpt-zarr requires no-such-module>=3.1; try  pip install --upgrade gangline-ckpt-zarr" in said


def test_broken_plugin_is_named_as_possible_supplier(strangers):
    strangers.add("acme-things", "raise RuntimeError('out of coffee')\n")
    said = ask(strangers, "checkpoint=vault")["said"]["checkpoint=vault"]
    assert "acme-things 0.1.0 may offer " in said
    assert "RuntimeError: out of coffee" in said


def test_multiline_import_error_is_reported_in_one_line(strangers):
    strangers.add("acme-things", "raise RuntimeError('out of\\n\\n  coffee')\n")
    [(_, why, _)] = ask(strangers)["failures"]
    assert why == "is installed but failed to import: RuntimeError: out of coffee"


@pytest.mark.parametrize("source", ["import sys\nsys.exit(0)\n", EXITING_HOOK])
def test_plugin_that_exits_is_a_broken_plugin(strangers, source):
    strangers.add("acme-things", source)
    found = ask(strangers, "checkpoint=torch")
    assert found["said"]["checkpoint=torch"].startswith("gangline-basics ")
    [(supplier, why, _)] = found["failures"]
    assert supplier == "acme-things 0.1.0"
    assert "SystemExit: 0" in why


@pytest.mark.parametrize(("contract", "fix"), [("v0", "--upgrade gangline-ckpt-zarr"), ("v2", "--upgrade gangline")])
def test_plugin_of_another_contract_is_not_imported(strangers, contract, fix):
    strangers.add("gangline-ckpt-zarr", "raise SystemExit('imported')\n", contract=contract, version="0.4.0")
    found = ask(strangers, "checkpoint=zarr")
    said = found["said"]["checkpoint=zarr"]
    assert f"gangline-ckpt-zarr 0.4.0 implements plugin contract {contract}, but this gangline supports v1" in said
    assert f"pip install {fix}" in said.splitlines()[2]


def test_missing_part_names_package_that_supplies_part(strangers):
    said = ask(strangers, "checkpoint=zarr", "moe=on", "parallel=3d")["said"]
    assert (
        f"checkpoint=zarr is supplied by gangline-ckpt-zarr:  {catalogue.get('gangline-ckpt-zarr')}"
        in said["checkpoint=zarr"]
    )
    assert "Installed choices for moe: off." in said["moe=on"]
    assert catalogue.get("gangline-parallel-megatron-style") in said["parallel=3d"]


def test_install_hints_name_available_packages():
    """Check that each catalogued package is in this repository, and that its hint installs it from there."""
    tree = Path(__file__).parents[2]
    for distribution in sorted({entry.distribution for entry in catalogue.ENTRIES}):
        assert (tree / distribution.removeprefix("gangline-") / "pyproject.toml").is_file()
        assert catalogue.get(distribution) == f"pip install -e {tree}/{distribution[9:]}"


def test_supplier_without_part_suggests_upgrade(strangers):
    strangers.add("gangline-ckpt-zarr", checkpointer("zarr_old", "gangline_ckpt_zarr"))
    said = ask(strangers, "checkpoint=zarr")["said"]["checkpoint=zarr"]
    assert "0.1.0 is installed but lacks checkpoint=zarr:  pip install --upgrade gangline-ckpt-zarr" in said


def test_misspelled_part_gets_suggestion(strangers):
    said = ask(strangers, "checkpoint=trch", "checkpiont=torch")["said"]
    assert "Did you mean checkpoint=torch?" in said["checkpoint=trch"]
    assert "there is no group 'checkpiont'" in said["checkpiont=torch"]
    assert "Did you mean checkpoint=torch?" in said["checkpiont=torch"]


def test_plugins_variable_limits_loaded_plugins(strangers):
    strangers.add("gangline-ckpt-zarr", checkpointer("zarr", "gangline_ckpt_zarr"), plugin="zarr")
    strangers.add("gangline-broken", "raise RuntimeError\n")
    core_alone = ask(strangers, "checkpoint=zarr", plugins="")
    assert "which GANGLINE_PLUGINS excludes; add zarr" in core_alone["said"]["checkpoint=zarr"]
    assert core_alone["failures"] == []
    assert ask(strangers, "checkpoint=zarr", plugins="zarr, ")["said"]["checkpoint=zarr"] == "gangline-ckpt-zarr 0.1.0"
    unknown = ask(strangers, "checkpoint=zarr", plugins="zrr")["said"]["checkpoint=zarr"]
    assert unknown.startswith(
        "GANGLINE_PLUGINS names 'zrr', which is not installed.\n  Did you mean zarr? Installed plugins: "
    )


PREAMBLE = """
from dataclasses import dataclass
from gangline import Command, Part, hookimpl
from gangline.config.schema import CheckpointConfig, EditConfig, PartConfig

class NoDataclass: pass
@dataclass
class Config(CheckpointConfig): pass
@dataclass
class Bare: pass
"""

BREACHES = {
    "an unknown hook": ("@hookimpl\ndef gangline_speeds(): return []", "unknown hook 'gangline_speeds'"),
    "a hook without its mark": (
        "def gangline_checkpointers(): return []",
        "the hook gangline_checkpointers is not marked with @hookimpl: write @hookimpl above the function",
    ),
    "an edit that is a default": (
        "@dataclass\nclass Edit(EditConfig): pass\n@hookimpl\ndef gangline_model_edits():\n"
        "    yield Part(group='weather', name='a', config=Edit, build='m:b', summary='s', default=True)",
        "weather=a: default=True has no effect: weather is off unless a run chooses a part; leave it out",
    ),
    "a need that a group is off": (
        "@hookimpl\ndef gangline_checkpointers():\n"
        "    yield Part(name='a', config=Config, build='m:b', summary='s', needs=('moe=off',))",
        "checkpoint=a: needs cannot contain moe=off: off is not a part; "
        "the check of the options can return a problem instead",
    ),
    "a hook with an argument": (
        "@hookimpl\ndef gangline_checkpointers(run): return []",
        "Argument(s) {'run'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "something that is no part": (
        "@hookimpl\ndef gangline_checkpointers(): return ['deep']",
        "'deep', which is not a Part",
    ),
    "a configuration that is no dataclass": (
        "@hookimpl\ndef gangline_checkpointers(): yield Part(name='a', config=NoDataclass, build='m:b', summary='s')",
        "config must be a dataclass",
    ),
    "a configuration of another group": (
        "@hookimpl\ndef gangline_checkpointers():\n    yield Part(name='a', config=Bare, build='m:b', summary='s')",
        "Bare must derive from gangline.config.CheckpointConfig",
    ),
    "another group than the hook's": (
        "@hookimpl\ndef gangline_schedules():\n"
        "    yield Part(group='checkpoint', name='a', config=Config, build='m:b', summary='s')",
        "part 'a' of gangline_schedules must be in the group 'schedule', not in 'checkpoint'; "
        "gangline_checkpointers offers parts of 'checkpoint'",
    ),
    "a group of its own under a hook that has one": (
        "@hookimpl\ndef gangline_schedules():\n"
        "    yield Part(group='weather', name='a', config=Config, build='m:b', summary='s')",
        "part 'a' of gangline_schedules must be in the group 'schedule', not in 'weather'",
    ),
    "options of another base than the hook's": (
        "@hookimpl\ndef gangline_schedules(): yield Part(name='a', config=Config, build='m:b', summary='s')",
        "schedule=a of gangline_schedules: its options Config must derive from gangline.config.ScheduleConfig",
    ),
    "an edit without the base of edits": (
        "@hookimpl\ndef gangline_model_edits():\n"
        "    yield Part(group='weather', name='a', config=Config, build='m:b', summary='s')",
        "weather=a of gangline_model_edits: its options Config must derive from gangline.config.EditConfig",
    ),
    "an edit in a group of another hook": (
        "@dataclass\nclass Edit(EditConfig): pass\n@hookimpl\ndef gangline_model_edits():\n"
        "    yield Part(group='checkpoint', name='a', config=Edit, build='m:b', summary='s')",
        "part 'a' of gangline_model_edits must be in a new group, not in 'checkpoint'; "
        "gangline_checkpointers offers parts of 'checkpoint'",
    ),
    "an edit without a group": (
        "@dataclass\nclass Edit(EditConfig): pass\n@hookimpl\ndef gangline_model_edits():\n"
        "    yield Part(name='a', config=Edit, build='m:b', summary='s')",
        "part 'a' of gangline_model_edits must name its group",
    ),
    "a part of core's group with other options": (
        "@hookimpl\ndef gangline_parts():\n"
        "    yield Part(group='simulator', name='a', config=Config, build='m:b', summary='s')",
        "simulator=a of gangline_parts: its options Config must derive from gangline.config.SimulatorConfig",
    ),
    "a part without a group": (
        "@hookimpl\ndef gangline_parts():\n    yield Part(name='a', config=Config, build='m:b', summary='s')",
        "must name its group",
    ),
    "a group that is a section": (
        "@hookimpl\ndef gangline_parts(): yield Part(group='batch', name='a', config=Config, build='m:b', summary='s')",
        "'batch' is reserved or not a valid name of a group",
    ),
    "one class for two parts": (
        "@hookimpl\ndef gangline_checkpointers():\n"
        "    for name in ('a', 'b'):\n        yield Part(name=name, config=Config, build='m:b', summary='s')",
        "checkpoint=a and checkpoint=b share the class Config",
    ),
    "a class of core's own": (
        "from gangline_basics.checkpoint.config import TorchCheckpoint\n@hookimpl\ndef gangline_checkpointers():\n"
        "    yield Part(name='a', config=TorchCheckpoint, build='m:b', summary='s')",
        "checkpoint=torch and checkpoint=a share the class TorchCheckpoint",
    ),
    "a name with capitals": (
        "@hookimpl\ndef gangline_checkpointers(): yield Part(name='Deep', config=Config, build='m:b', summary='s')",
        "must consist of lower-case",
    ),
    "a hook that raises": ("@hookimpl\ndef gangline_checkpointers(): raise OSError('no disk')", "OSError: no disk"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_contract_breach_is_reported_as_failure(strangers, breach):
    source, message = BREACHES[breach]
    strangers.add("gangline-breach", PREAMBLE + source)
    strangers.add("gangline-deep", checkpointer("deep", "gangline_deep"))
    found = ask(strangers, "checkpoint=deep", "checkpoint=torch")
    [(supplier, why, fix)] = found["failures"]
    assert supplier == "gangline-breach 0.1.0"
    assert "breaks the plugin contract" in why
    assert message in why
    assert fix == "Try  pip install --upgrade gangline-breach"
    assert found["said"]["checkpoint=deep"] == "gangline-deep 0.1.0"  # the other plugins are available
    assert "a" not in found["offers"]["checkpoint"]


def test_edit_group_is_recognized_by_class(strangers):
    source = PREAMBLE + textwrap.dedent("""
        @dataclass
        class Edit(EditConfig): pass
        @dataclass
        class Plain(PartConfig): pass
        @dataclass
        class Wet(EditConfig): pass
        @hookimpl
        def gangline_parts():
            yield Part(group="weather", name="rain", config=Plain, build="m:b", summary="None")
        @hookimpl
        def gangline_model_edits():
            yield Part(group="adapter", name="on", config=Edit, build="m:b", summary="An edit")
            yield Part(group="adapter", name="wet", config=Wet, build="m:b", summary="An edit", reads=("weather",))
    """)
    strangers.add("gangline-lora", source)
    found = ask(strangers)
    assert found["edits"] == ["adapter", "dpo", "lora", "moe", "mtp", "mup"]
    assert found["offers"]["weather"] == ["rain"]
    assert not found["failures"]


def test_part_of_unread_group_is_plugin_error(strangers):
    """Add a part to a group that no part reads, and parts to nested groups that no part opens."""
    source = PREAMBLE + textwrap.dedent("""
        @dataclass
        class Edit(EditConfig): pass
        @dataclass
        class Rain(PartConfig): pass
        @dataclass
        class Site(PartConfig): pass
        @dataclass
        class Router(PartConfig): pass
        @hookimpl
        def gangline_model_edits():
            yield Part(group="adapter", name="on", config=Edit, build="m:b", summary="An edit")
        @hookimpl
        def gangline_parts():
            yield Part(group="weather", name="rain", config=Rain, build="m:b", summary="None")
            yield Part(group="adapter/site", name="all", config=Site, build="m:b", summary="None")
            yield Part(group="moe/router", name="mine", config=Router, build="m:b", summary="None")
    """)
    strangers.add("gangline-lora", source)
    found = ask(strangers, "adapter=on", "weather=rain", "adapter/site=all", "moe/router=mine")
    said = found["said"]
    assert said["adapter=on"] == "gangline-lora 0.1.0"
    assert "is never built: weather is not a group of core" in said["weather=rain"]
    assert 'Part(..., reads=("weather",))' in said["weather=rain"]
    assert "no part of adapter opens the group adapter/site" in said["adapter/site=all"]
    assert "pip install gangline-moe" in said["moe/router=mine"]
    told = [f"{supplier} {why}" for supplier, why, _ in found["failures"]]
    assert len(told) == 3
    assert all(line.startswith("gangline-lora 0.1.0 offers ") for line in told)


def test_field_declared_for_two_groups_is_refused(strangers):
    source = textwrap.dedent("""
        from dataclasses import dataclass, field
        from gangline import Part, hookimpl
        from gangline.config.schema import ParallelConfig
        @dataclass
        class One(ParallelConfig):
            inner: ParallelConfig = field(default_factory=ParallelConfig)
        @dataclass
        class Two(One): pass
        @hookimpl
        def gangline_parallel_strategies():
            opens = {"inner": "adamw"}
            yield Part(name="one", config=One, build="m:b", summary="s", opens=opens, views={"inner": "parallel"})
            yield Part(name="two", config=Two, build="m:b", summary="s", opens=opens, views={"inner": "optimizer"})
    """)
    strangers.add("gangline-deep", source)
    said = ask(strangers, "parallel=one")["said"]["parallel=one"]
    assert (
        "two parts fill parallel/inner from different groups: parallel=one (gangline-deep 0.1.0) from parallel" in said
    )
    assert "parallel=two (gangline-deep 0.1.0) from optimizer" in said
    assert "Rename one of the fields" in said


# --- parts of core ---


def test_core_has_a_default_for_every_group():
    from gangline.config.defaults import get_default_choices

    assert set(get_default_choices()) == set(GROUPS)
    for group, choice in get_default_choices().items():
        for name in choice if isinstance(choice, list) else [choice]:
            assert installed().find(group, name).distribution in ("gangline-core", "gangline-basics")


def test_every_core_group_has_a_part():
    assert installed().failures == []
    for group in GROUPS:
        if group not in ("health", "callback"):
            assert installed().get_offers(group)


def test_each_hook_has_one_specification():
    modules = {hook.spec.partition(":")[0] for hook in HOOKS}
    functions = [name for module in modules for name in vars(import_module(module)) if name.startswith("gangline_")]
    assert sorted(functions) == sorted(hook.name for hook in HOOKS)
    files = Path(load(HOOKS[0].spec).__code__.co_filename).parent.glob("[!_]*.py")
    assert modules == {f"gangline.plugin.specs.{path.stem}" for path in files}


def test_each_hook_names_public_options_and_contract():
    for hook in HOOKS:
        assert getattr(gangline.config, hook.options.__name__) is hook.options
        if hook.contract:
            module, _, name = hook.contract.rpartition(".")
            assert load(f"{module}:{name}").__module__ == module


def test_run_has_a_field_for_each_group():
    types = get_type_hints(Run)
    assert {group for group in types if group in BY_GROUP} == set(GROUPS)
    for group, base in GROUPS.items():
        assert types[group] == (dict[str, base] if group in LISTS else base)


def test_run_parts_lists_each_group_of_the_table():
    from gangline.config.defaults import build_default_run

    run = replace(build_default_run(), **{group: {"a": GROUPS[group]()} for group in LISTS})
    assert [path for path, _ in run.iterate_parts()] == [*SINGLE, *(f"{group}.a" for group in LISTS)]


def test_every_configuration_class_finds_its_part():
    for group in installed().list_groups():
        for name, offer in installed().get_offers(group).items():
            assert installed().find_part(offer.part.config()).part.name == name


def test_unknown_configuration_class_is_refused():
    from gangline.config.schema import CheckpointConfig

    with pytest.raises(
        UserError, match=r"no installed part has the configuration class gangline\.config\.schema\.CheckpointConfig"
    ):
        installed().find_part(CheckpointConfig())


def test_off_is_a_choice_of_edit_groups():
    assert installed().find_choices("moe")[0] == OFF
    assert OFF not in installed().find_choices("parallel")


def test_build_passes_configuration_to_part_function():
    from gangline.config.defaults import build_default_run
    from gangline_basics.checkpoint.config import Off

    run = build_default_run(checkpoint="off", run={"dir": "somewhere"})
    assert build(Off(), run, None).run_dir == "somewhere"


def test_build_with_missing_requirement_is_user_error(strangers, monkeypatch):
    source = checkpointer("deep", "gangline_deep_work")
    strangers.add("gangline-deep", source)
    (strangers.site / "gangline_deep_work.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(str(strangers.site))
    installed.cache_clear()
    try:
        offer = installed().find("checkpoint", "deep")
        with pytest.raises(UserError) as caught:
            build(offer.part.config())
    finally:
        installed.cache_clear()
    assert "checkpoint=deep needs the Python package 'no_such_module', which is not installed." in str(caught.value)
    assert "pip install --upgrade gangline-deep" in str(caught.value)


def test_the_catalogue_names_parts_by_group():
    assert catalogue.find_supplier("moe", "mixtral_8x7b") == "gangline-moe"
    assert catalogue.find_supplier("moe", "nothing") is None
    assert {"on", "deepseek_v3"} <= set(catalogue.list_names("moe"))
    assert catalogue.find_suppliers("checkpoint") == {"gangline-basics": "torch, off", "gangline-ckpt-zarr": "zarr"}
    assert catalogue.edit_groups() == {"dpo", "lora", "moe", "mtp", "mup"}
