"""`train` and `gangline` without errors: help, `--cfg`, plugins, completion, multirun, resume, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import yaml

from gangline.cli import complete, help, main, train
from gangline.config.defaults import build_default_run
from gangline.config.sections import SECTIONS
from gangline.config.serial import from_dict
from gangline.launch.signals import NOTICES
from gangline.plugin.registry import installed
from gangline.run.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("core_alone")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, command, *words: str) -> str:
    assert command.main(list(words)) == 0
    return capsys.readouterr().out


# --- help and configuration ---


def test_help_shows_every_group_choice_section_and_default(capsys):
    page = said(capsys, train, "--help")
    for group in installed().list_groups():
        for name in installed().find_choices(group):
            assert re.search(rf"^  {group}=.*(\n {{6,}}.*)*", page, re.MULTILINE)
            assert name in page
    for section, cls in SECTIONS.items():
        for field in cls.__dataclass_fields__:
            assert re.search(rf"^  {section}\.{field}=\S+  +\S", page, re.MULTILINE), f"{section}.{field} says nothing"
    for word in ("tiny*", "adamw*", "(not installed: 3d,", "resume=RUN_DIR", "recipe=NAME", "Examples"):
        assert word in page


def test_help_of_a_part_shows_its_options(capsys):
    page = said(capsys, train, "optimizer=muon", "--help")
    assert re.search(r"^Options of optimizer=muon\n(  optimizer\..*\n?)+", page, re.MULTILINE)
    assert "optimizer.momentum=0.95" in page
    assert "run.steps" not in page
    assert "  none" in said(capsys, train, "precision=fp32", "-h")


def test_every_help_example_composes():
    from gangline.config.compose import compose

    examples = re.findall(r"^  train( .*?)?(?:   +.*)?$", help._EXAMPLES, re.MULTILINE)
    assert len(examples) >= 6
    for example in examples:
        words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", example)]
        compose([word for word in words if word != "-m" and not word.startswith("resume=")])


def test_cfg_prints_complete_configuration(capsys):
    page = said(capsys, train, "--cfg", "job", "run.steps=7")
    assert from_dict(yaml.safe_load(page)) == build_default_run(run={"steps": 7})
    assert said(capsys, train, "--cfg=job", "run.steps=7") == page
    several = said(capsys, train, "-m", "-c", "job", "run.seed=1,2")
    assert [content["run"]["seed"] for content in yaml.safe_load_all(several)] == [1, 2]


def test_cfg_prints_resumed_configuration(capsys):
    RunDirectory.create(build_default_run(run={"dir": "out", "steps": 5})).unlock()
    assert yaml.safe_load(said(capsys, train, "resume=out", "run.steps=9", "--cfg", "job"))["run"]["steps"] == 9


def test_train_and_gangline_print_same_version(capsys):
    assert said(capsys, train, "--version") == said(capsys, main, "--version") != "\n"


# --- gangline ---


def test_help_lists_every_command(capsys):
    page = said(capsys, main)
    for verb, command in installed().get_commands().items():
        assert re.search(rf"^  {verb} +{re.escape(command.summary)}$", page, re.MULTILINE)
    assert said(capsys, main, "help") == page


def test_every_core_command_can_be_imported():
    from gangline.plugin.registry import load

    for command in installed().get_commands().values():
        assert callable(load(command.run))


def test_plugins_lists_suppliers_and_installable_parts(capsys):
    page = said(capsys, main, "plugins")
    for group in installed().list_groups():
        for name, offer in installed().get_offers(group).items():
            assert re.search(
                rf"^{group} +{re.escape(name)} +{re.escape(offer.part.summary)} +gangline-(core|basics) ",
                page,
                re.MULTILINE,
            )
    assert re.search(
        r"Known parts that are not installed\n(.*\n)*.*parallel=3d +.* +pip install "
        r"(gangline|-e .*/parallel)-megatron-style",
        page,
    )
    assert "Cannot be used" not in page


def test_plugins_filters_by_group_and_prints_names(capsys):
    page = said(capsys, main, "plugins", "optimizer")
    assert "adamw" in page
    assert "tiny" not in page
    assert said(capsys, main, "plugins", "--names", "optimizer").split() == [
        "optimizer=adamw",
        "optimizer=adamw8bit",
        "optimizer=lion",
        "optimizer=muon",
        "optimizer=soap",
    ]


def test_plugins_shows_layout_dependent_parts(strangers):
    strangers.add(
        "gangline-lossy",
        """
from dataclasses import dataclass
from gangline import Part, hookimpl
from gangline.config.schema import OptimizerConfig

@dataclass
class Lossy(OptimizerConfig): pass

@hookimpl
def gangline_optimizers():
    yield Part(name="lossy", config=Lossy, build="a:b", summary="Loses", layout_dependent="rounds on the wire")
""",
    )
    done = strangers.run("gangline.cli.main", "plugins")
    assert done.returncode == 0, done.stderr
    told = done.stdout.partition("Depends on the layout\n")[2].partition("\n\n")[0].splitlines()
    assert "  optimizer=lossy: rounds on the wire" in told
    assert any(line.startswith("  precision=fp16: sums over tokens are in float16") for line in told)


# --- completion ---


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["para"], ["parallel.", "parallel="]),
        (["parallel="], ["parallel=ddp", "parallel=single"]),
        (["parallel=d"], ["parallel=ddp"]),
        (["moe="], ["moe=off"]),
        (["run.s"], ["run.sample=", "run.save_on_signal=", "run.seed=", "run.steps="]),
        (["run.recompute="], ["run.recompute=none", "run.recompute=selective", "run.recompute=full"]),
        (["run.deterministic=t"], ["run.deterministic=true"]),
        (["optimizer.mo"], []),
        (["optimizer=muon", "optimizer.mo"], ["optimizer.momentum="]),
        (["track=[j"], ["track=[jsonl"]),
        (["track=[jsonl,"], ["track=[jsonl,console", "track=[jsonl,tensorboard"]),
        (["track=[jsonl]", "track."], ["track.jsonl."]),
        (["recipe="], ["recipe=quick", "recipe=tiny"]),
        (["--mul"], ["--multirun"]),
        (["nothing="], []),
    ],
)
def test_completion_lists_candidates(words, found):
    assert complete.list_candidates(words) == found


def test_run_directories_are_completed(here):
    for name in ("one", "two"):
        RunDirectory.create(build_default_run(run={"dir": f"runs/{name}"})).unlock()
    (here / "other").mkdir()
    assert complete.list_candidates(["resume="]) == ["resume=other/", "resume=runs/"]
    assert complete.list_candidates(["resume=runs/"]) == ["resume=runs/one", "resume=runs/two"]
    assert complete.list_candidates(["from=runs/t"]) == ["from=runs/two"]


def in_bash(here, line: str) -> list[str]:
    """Return the completions that bash offers when Tab is pressed at the end of `line`."""
    program = here / "bin" / "train"
    if not program.exists():
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gangline.cli.train "$@"\n')
        program.chmod(0o755)
    script = (
        "source <(train --completion bash); COMP_LINE=$1; COMP_POINT=${#1}; _gangline_train\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script, "bash", line], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("train optimizer=m", ["muon"]),  # bash itself keeps the text before the "="
        ("train optimizer=muon optimizer.mom", ["optimizer.momentum="]),
        ("train run.steps=3 parallel=", ["ddp", "single"]),
    ],
)
def test_bash_completes_options_and_parts(here, line, found):
    assert in_bash(here, line) == found


def test_bash_completes_empty_argument_with_all_candidates(here):
    assert {"parallel=", "run.", "recipe="} <= set(in_bash(here, "train "))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_scripts_call_train_complete(capsys, shell):
    assert "train --complete" in said(capsys, train, "--completion", shell)


# --- multirun ---


def test_multirun_continues_after_failure_and_prints_table(runs):
    RunDirectory.create(build_default_run(run={"dir": str(runs.directory / "sweep" / "01")})).unlock()
    words = ["-m", "run.seed=1,2,3", "optimizer.learning_rate=1e-3", "run.dir=sweep", "run.steps=2", "validate.every=2"]
    printed = runs.train(*words, code=2)
    assert "sweep/01 already holds a run." in printed
    assert re.search(r"^sweep/01 +run\.seed=2 +2$", printed, re.MULTILINE), printed
    for number, seed in (("00", 1), ("02", 3)):
        directory = RunDirectory.open(runs.directory / "sweep" / number)
        assert directory.run().seed == seed
        assert f"run.seed={seed}" in directory.read_provenance()["starts"][0]["command"]
        records = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
        row = rf"^sweep/{number} +run\.seed={seed} +2 +{records[-1]['loss']:.4f} +\d\.\d+ +0$"
        assert re.search(row, printed, re.MULTILINE), printed
    assert "run 1 of 3: run.seed=1" in printed


def test_multirun_with_invalid_run_is_refused(runs):
    printed = runs.expect_refusal("-m", "batch.global_size=4,0", "run.dir=sweep")
    assert "batch.global_size=0 must be at least 1." in printed
    assert not (runs.directory / "sweep").exists()


@pytest.mark.parametrize("word", ["resume=/a b", "resume='/a b'", 'resume="/a b"'])
def test_resume_takes_a_path_in_quotes(word):
    assert train.read([word]).resume == "/a b"


def test_notice_signals_before_start_are_ignored(monkeypatch, tmp_path):
    """Ignore a scheduler's SIGUSR1, which would otherwise end `train` before the run starts."""
    before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in NOTICES}
    try:
        assert train.main([f"resume={tmp_path}/missing"]) == 2
        assert {signal.getsignal(signum) for signum in NOTICES} == {signal.SIG_IGN}
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_sigterm_while_composing_ends_train_with_message(here):
    """Send SIGTERM while `train` composes the run; the composition lasts longer than the test."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", COMPOSES], cwd=here, **pipes, text=True, start_new_session=True)
    assert process.stdout.readline() == "composing\n"
    process.send_signal(signal.SIGUSR1)  # a notice signal, which is ignored before the run starts
    process.send_signal(signal.SIGTERM)
    _, said_last = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert said_last == "train: SIGTERM ended the command while no rank was running; there was no state to save\n"


COMPOSES = """
import signal, sys, time
for one in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(one, signal.SIG_DFL)
from gangline.cli.train import main
from gangline.config import compose


def compose_one(words):
    print("composing", flush=True)
    time.sleep(120)


compose.compose_one = compose_one
sys.exit(main(["run.steps=1"]))
"""
