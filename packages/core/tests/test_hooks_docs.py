"""Example plugin in the docstring of every hook: installed together, listed, composed and trained."""

from __future__ import annotations

import json
import re
import textwrap

import pytest

from gangline.plugin.hooks import BY_NAME, HOOKS
from gangline.plugin.registry import load

pytestmark = pytest.mark.usefixtures("core_alone")

NAMES = [hook.name for hook in HOOKS]


def example(hook: str) -> tuple[str, str]:
    """Return the module name and the source of the plugin in a hook's docstring."""
    block = re.search(r"::\n\n((?: {8}.*\n|\n)+)", load(BY_NAME[hook].spec).__doc__ + "\n")
    assert block, f"{hook} has no example"
    source = textwrap.dedent(block[1])
    name = re.match(r"# (\w+)\.py: ", source)
    assert name, f"the example of {hook} does not say what its file is called"
    return name[1], source


@pytest.fixture
def documented(strangers):
    """Install the example plugins of all hooks together."""
    for hook in NAMES:
        module, source = example(hook)
        strangers.add(module.replace("_", "-"), source, module=module)
    return strangers


def gangline(documented, *words: str) -> str:
    done = documented.run("gangline.cli.main", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("hook", NAMES)
def test_hook_example_is_short_and_implements_the_hook(hook):
    module, source = example(hook)
    also = ["gangline_trackers"] if hook == "gangline_parts" else []  # its tracker reads the group that it adds
    assert re.findall(r"^def (gangline_\w+)\(\):", source, re.MULTILINE) == [hook, *also]
    assert module.startswith("gangline_")
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) <= 30


def test_plugins_command_lists_example_parts_with_supplier(documented):
    table = gangline(documented, "plugins")
    for group, name, supplier in [
        ("model", "tapered", "gangline-tapered"),
        ("parallel", "watched", "gangline-watched"),
        ("precision", "coarse", "gangline-coarse"),
        ("optimizer", "signum", "gangline-signum"),
        ("schedule", "rsqrt", "gangline-rsqrt"),
        ("checkpoint", "elsewhere", "gangline-elsewhere"),
        ("data", "counting", "gangline-counting"),
        ("track", "mine", "gangline-mine"),
        ("health", "ceiling", "gangline-ceiling"),
        ("callback", "streak", "gangline-streak"),
        ("launch", "timed", "gangline-timed"),
        ("simulator", "expected", "gangline-expected"),
        ("greeting", "plain", "gangline-greeting"),
        ("narrow", "on", "gangline-narrow"),
    ]:
        assert re.search(rf"^{group} +{name} .*{supplier} +0\.1\.0", table, re.MULTILINE), table
    assert "Cannot be used" not in table


def test_example_plugin_command_runs(documented, tmp_path):
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    assert gangline(documented, "listing", str(tmp_path / "runs")).split() == [str(run)]


def test_new_plugin_uses_template_of_example_kind(documented, tmp_path):
    words = ["new-plugin", "quiet", "--kind", "whisper"]
    done = documented.run("gangline.cli.main", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "gangline-quiet" / "gangline_quiet.py").read_text()
    assert written.startswith("# gangline_quiet.py: print a lower-case line for each step.")
    assert 'Part(name="quiet", config=Quiet, build=build' in written
    compile(written, "gangline_quiet.py", "exec")


def test_one_run_made_of_all_examples_trains(runs, documented):
    kept = runs.directory / "kept"
    printed = runs.train(
        "model=tapered",
        "parallel=watched",
        "precision=coarse",
        "optimizer=signum",
        "schedule=rsqrt",
        "checkpoint=elsewhere",
        f"checkpoint.folder={kept}",
        "data=counting",
        "data.path=null",
        "data.stride=3",
        "track=[jsonl,mine,greeting]",
        "greeting=plain",
        "callback=[streak]",
        "launch=timed",
        "health=[ceiling]",
        "health.ceiling.above=0.5",
        "narrow=on",
        "narrow.by=4",
        "run.dir=out",
        "run.steps=3",
        **documented.environment,
    )
    records = runs.read_records("out")
    assert [record["step"] for record in records] == [1, 2, 3], printed
    assert all("loss_spread" in record["metrics"] for record in records)  # parallel=watched
    assert [record["metrics"]["streak/length"] for record in records] == [1, 2, 3]  # callback=[streak]
    assert "\nmine 3 " in printed  # track=[mine]
    assert printed.startswith("hello, run\n")  # greeting=plain
    assert re.search(r"^took \d+\.\d s, exit code 0$", printed, re.MULTILINE)  # launch=timed
    assert [path.name for path in (kept / "out").iterdir()] == ["step-00000003"]  # checkpoint=elsewhere
    assert all(verdict["kind"] == "high-loss" for record in records for verdict in record["verdicts"])
    assert any(record["verdicts"] for record in records)  # health=[ceiling]
    facts = json.loads((runs.directory / "out" / "provenance.json").read_text())
    assert facts["data"]["fingerprint"] == "counting-3-16-256-0"
    document = json.loads((kept / "out" / "step-00000003" / "document.json").read_text())
    assert document["parts"]["narrow"] == {"part": "on", "distribution": "gangline-narrow", "version": "0.1.0"}
    for group, part in {"model": "tapered", "optimizer": "signum", "schedule": "rsqrt", "precision": "coarse"}.items():
        assert document["parts"][group]["part"] == part


def test_example_model_edit_changes_model(documented, monkeypatch):
    monkeypatch.syspath_prepend(str(documented.site))
    from gangline.config.defaults import build_default_run
    from gangline.model.compose import compose_model
    from gangline.model.tree import get_parameter_shapes
    from gangline.plugin.registry import installed

    installed.cache_clear()
    try:
        wide, _ = compose_model(build_default_run())
        narrow, _ = compose_model(build_default_run(narrow="on"))
    finally:
        installed.cache_clear()
    name = "blocks.0.feed_forward.w_up.weight"
    assert get_parameter_shapes(wide)[name][0] == 2 * get_parameter_shapes(narrow)[name][0]
