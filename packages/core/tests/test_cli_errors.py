"""Mistakes on the command line: one message, exit code 2, no traceback, no files left."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gangline.cli.train import main
from gangline.config.fields import get_defaults
from gangline.config.sections import SECTIONS
from gangline.plugin import catalogue
from gangline.plugin.hooks import GROUPS
from gangline.plugin.registry import installed
from gangline.run.directory import RunDirectory
from gangline_testkit import warm

pytestmark = pytest.mark.usefixtures("core_alone")

ZARR = """
from dataclasses import dataclass
from gangline import Part, hookimpl
from gangline.config.schema import CheckpointConfig

@dataclass
class Config(CheckpointConfig): pass

@hookimpl
def gangline_checkpointers():
    yield Part(name="zarr", config=Config, build="gangline_ckpt_zarr:build", summary="Keeps things")
"""


def command(module: str, *words: str, cwd: Path, strangers=None) -> subprocess.CompletedProcess:
    environment = {**os.environ, **(strangers.environment if strangers else {}), "OMP_NUM_THREADS": "1"}
    started = [*warm.make_command(module, environment), *words]
    return subprocess.run(started, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def refused(tmp_path: Path, *words: str, strangers=None, module: str = "gangline.cli.train") -> str:
    done = command(module, *words, cwd=tmp_path, strangers=strangers)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("train: " if module.endswith("train") else "gangline")
    assert not (tmp_path / "runs").exists()
    return done.stderr


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ["optimizer=adam"],
            ["optimizer=adam is not available here.", "Did you mean optimizer=adamw?", "adamw, adamw8bit, lion"],
        ),
        (
            ["moe=on"],
            [
                "moe=on is not available here.",
                f"gangline-moe:  {catalogue.get('gangline-moe')}",
                "choices for moe: off.",
            ],
        ),
        (["moe=onn"], ["moe=onn is not available here.", "Did you mean moe=on?"]),
        (["moe=true"], ["moe=on is not available here.", catalogue.get("gangline-moe")]),
        (["+moe=on"], ["moe=on is not available here.", catalogue.get("gangline-moe")]),
        (["health=x"], ["health=x is not available here."]),
        (["data=texts/a.txt"], ["To read files:  data.path=texts/a.txt"]),
        (["data=*.txt"], ["To read files:  'data.path=*.txt'"]),
        (["model=meta-llama/Llama-3.2-1B"], ["gangline import meta-llama/Llama-3.2-1B  prints the command"]),
        (
            ["wandb=true"],
            ["Did you mean track=[console,jsonl,tensorboard,wandb]?", "track=wandb is supplied by gangline-track:"],
        ),
        (["comet=true"], ["comet is not supported here. Choices: track=", "gangline new-plugin comet --kind tracker"]),
        (
            ["tp=2"],
            [
                "Type  parallel=tp launch.processes=2, or with other axes  parallel=3d parallel.tp=2",
                "parallel=tp is supplied by",
            ],
        ),
        (["pp=4"], ["Type  parallel=pp launch.processes=4"]),
        (["cp=2"], ["Type  parallel=3d parallel.cp=2"]),
        (["dp=8"], ["Type  parallel=ddp launch.processes=8"]),
        (["fsdp=true"], ["Type  parallel=fsdp launch.processes=N"]),
        (["zero=2"], ["Type  parallel=fsdp parallel.zero=2"]),
        (["ep=2"], ["Type  moe=on moe.ep=2"]),
        (["training.tensor_parallel_degree=2"], ["Type  parallel=tp launch.processes=2"]),
        (["gradient_checkpointing=true"], ["Type  run.recompute=full  (activation checkpointing"]),
        (["gradient_accumulation_steps=4"], ["batch.micro_size=N  (gradient accumulation = batch.global_size / "]),
        (["model.dropout=0.1"], ["Type  optimizer.weight_decay=0.1  (models have no dropout here"]),
        (["save_total_limit=3"], ["Did you mean checkpoint.keep_last?"]),
        (["batch.size=8"], ["Did you mean batch.global_size or batch.micro_size?"]),
        (["mine.yaml"], ["cannot read 'mine.yaml'", "To use the file as a recipe:  train recipe=mine.yaml"]),
        (["--bf16"], ["there is no flag --bf16.", "Type  precision=bf16"]),
        (["--model_name_or_path", "x"], ["Type  model.weights=DIR"]),
        (["--job.config_file=x.toml"], ["Type  recipe=FILE.yaml"]),
        (
            ["track=[console,wandb]"],
            ["track=wandb is not available here.", "track=wandb is supplied by gangline-track:"],
        ),
        (["run.recompute=Full"], ["run.recompute=Full: expected none or selective or full", "Did you mean full?"]),
        (
            ["track.wandb=true"],
            ["add it:  track=[...,wandb]", "track=wandb is supplied by gangline-track:"],
        ),
        (["bf16=true"], ["Type  precision=bf16"]),
        (["tensorboard=on"], ["Did you mean track=[console,jsonl,tensorboard]?"]),
        (["--lr", "1e-3"], ["there is no flag --lr.", "without dashes:  optimizer.learning_rate=1e-3"]),
        (["--batch-size=8"], ["without dashes:  batch.global_size=8"]),
        (["--steps", "10"], ["without dashes:  run.steps=10"]),
        (["--every", "10"], ["validate.every=10  or  checkpoint.every=10"]),
        (["moe.k=2"], ["there is no option moe.k.", "moe is off in this run", "gangline-moe offers on,"]),
        (["ckpt=torch"], ["there is no group ckpt, and no option.", "Did you mean checkpoint=torch?"]),
        (["+ckpt=zarr"], ["there is no group ckpt, and no option.", "Did you mean checkpoint=zarr?"]),
        (["optimiser=adamw"], ["there is no group optimiser", "Did you mean optimizer=adamw?"]),
        (["steps=3"], ["there is no group steps, and no option.", "Did you mean run.steps=3?"]),
        (["optimizer.learning_rat=3"], ["no option optimizer.learning_rat.", "Did you mean optimizer.learning_rate?"]),
        (["optimizer.lr=1"], ["there is no option optimizer.lr.", "Did you mean optimizer.learning_rate?"]),
        (["lr=1"], ["there is no group lr, and no option.", "Did you mean optimizer.learning_rate?"]),
        (["train.epochs=1"], ["there is no option train.epochs.", "run.steps=N  (N = epochs x "]),
        (["model.seq-len=1"], ["there is no option model.seq-len.", "Did you mean batch.sequence_length?"]),
        (["optimizer.momentum=1"], ["Parts of optimizer that have the option momentum: muon."]),
        (["+run.speed=3"], ["there is no option run.speed.", "Options: name, dir, seed, steps"]),
        (["run.steps.more=3"], ["there is no option run.steps.more."]),
        (["run=3"], ["run is a section; set one of its options."]),
        (["float8.margin=1"], ["there is no option float8.margin.\n  Groups: "]),
        (["--unknown-name=x"], ["there is no flag --unknown-name=x.\n  Flags: "]),
        (["batch.ramp=[4,8]"], ["batch.ramp=[4,8]: this option is a mapping.", "Type  batch.ramp={NAME:VALUE}"]),
        (["callback=[profile]", "--callback.profile.foo=1"], ["without dashes:  callback.profile.foo=1"]),
        (["run.steps=many"], ["run.steps=many: expected an integer, got 'many'."]),
        (["optimizer.learning_rate=[1]"], ["optimizer.learning_rate=[1]: expected a number"]),
        (["run.recompute=half"], ["run.recompute=half: expected none or selective or full"]),
        (["batch.global_size=null"], ["batch.global_size=null: expected an integer, got null."]),
        (["run.steps=x", "run.seed=y"], ["2 problems:", "1. run.seed=y", "2. run.steps=x"]),
        (["optimizer=a", "track=[b]", "run.c=1"], ["3 problems:", "optimizer=a", "track=b", "run.c"]),
        (["track=console,jsonl"], ["has several values.", "train -m track=console,jsonl", "track=[console,jsonl]"]),
        (["track.jsonl.path=x", "track=[console]"], ["track=jsonl is not chosen; add it:  track=[...,jsonl]"]),
        (["model=[a,b]"], ["a run has exactly one part of model; write model=<name>."]),
        (["model="], ["model= needs the name of a part."]),
        (["model@x=tiny"], ["'@' is not supported"]),
        (["~run.steps"], ["'~' can remove only a group; set an option to null instead."]),
        (["~optimizer"], ["optimizer=off is not available here."]),
        (["steps"], ["cannot read 'steps': expected key=value.", "without spaces around =, as in  run.steps=10"]),
        (["run.steps", "=", "10"], ["cannot read 'run.steps'", "without spaces around =, as in  run.steps=10"]),
        (["rexume"], ["cannot read 'rexume'", "Did you mean resume?"]),
        (["data.path=[a"], ["cannot read 'data.path=[a': the closing ] is missing.", "Quote the complete argument"]),
        (["run.name={a: [1"], ["cannot read 'run.name={a: [1': the closing ] is missing"]),
        (["parallel={a: 1, 'b': {c: 1, c: 2}}"], ["has the key 'c' twice", "Leave out one of the two values"]),
        (["run.name='it"], ["cannot read \"run.name='it\": the closing ' is missing."]),
        (['run.name="a\\\\\\"'], [': the closing " is missing.']),
        (["run steps=3"], ["cannot read 'run steps=3': expected key=value."]),
        (["run.name=${nothing}"], ["the configuration cannot be composed.", "nothing", "full_key: run.name"]),
        (["run.name={a: ${x:y,x:z}}"], ["the configuration cannot be composed."]),
        (
            ["run.name=${oc.select:data.path,${oc.env:X}}"],
            ["${oc.env:NAME} is not supported inside another ${...} reference."],
        ),
        (["run.name=${oc.env:NO_SUCH_VARIABLE}"], ["needs the environment variable NO_SUCH_VARIABLE"]),
        (["hydra.run.dir=x"], ["there is no option hydra.run.dir."]),
        (["recipe=tniy"], ["there is no recipe 'tniy'.", "Did you mean tiny?"]),
        (["from=nowhere"], ["there is no run directory nowhere."]),
        (["resume=nowhere"], ["there is no run directory nowhere.", "There are no runs in this folder or in runs/."]),
        (["resume=nowhere", "recipe=tiny"], ["resume= continues a run, but recipe=tiny starts a new run."]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_overrides_are_refused_with_hint(tmp_path, monkeypatch, capsys, words, messages):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--cfg", "job"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("train: ")
    for message in messages:
        assert message in said.err
    assert "use +" not in said.err
    assert "search path" not in said.err.lower()


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["-m", "resume=x", "run.seed=1,2"], ["resume= continues one run; -m starts several runs."]),
        (["-m", "run.steps=1,x"], ["run.steps=x: expected an integer"]),
        (["parallel=ddp", "launch.processes=3"], ["batch.global_size=16 is not divisible by 3"]),
        (["launch.processes=2"], ["parallel=single supports one process, and this job has 2 processes."]),
        (["run.dir=/proc/x"], ["cannot write the run directory /proc/x"]),
        (["run.device=gpu"], ["run.device=gpu must be cpu, cuda or cuda:N.", "The name of a GPU is cuda."]),
        (["optimizer.learning_rate=nan", "run.dir=new"], ["learning_rate=nan must be finite and at least 0."]),
        (["data.path=nothing.txt"], ["nothing.txt"]),
        (["--steps=3"], ["there is no flag --steps=3.", "Set options without dashes:  run.steps=3"]),
        (["--hlep"], ["there is no flag --hlep.", "Did you mean --help?"]),
        (
            ["--completion", "tcsh"],
            ["train --completion does not support the shell 'tcsh'.", "Shells: bash, zsh, fish."],
        ),
        (["optimizer=adam", "--help"], ["optimizer=adam is not available here."]),
        (["optimizer=adam", "--cfg", "job"], ["optimizer=adam is not available here."]),
        (
            ["optimizer=adam"],
            ["optimizer=adam is not available here.", "Did you mean optimizer=adamw?", "adamw, adamw8bit, lion"],
        ),
        (["+ckpt=zarr"], ["there is no group ckpt, and no option.", "Did you mean checkpoint=zarr?"]),
        (["optimizer.learning_rat=3"], ["no option optimizer.learning_rat.", "Did you mean optimizer.learning_rate?"]),
        (["run.steps=many"], ["run.steps=many: expected an integer, got 'many'."]),
        (["resume=nowhere"], ["there is no run directory nowhere."]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_train_refuses_invalid_arguments_with_exit_code_2(tmp_path, monkeypatch, capsys, words, messages):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("train: ")
    assert not (tmp_path / "runs").exists()
    for message in messages:
        assert message in said.err


def test_resume_of_a_checkpoint_names_its_run(tmp_path):
    (tmp_path / "out" / "checkpoints" / "step-00000010").mkdir(parents=True)
    said = refused(tmp_path, "resume=out/checkpoints/step-00000010")
    assert "out/checkpoints/step-00000010 is a checkpoint, not a run directory." in said
    assert "train resume=out\n" in said
    assert "train from=out weights=out/step-00000010" in said


def test_too_long_directory_name_is_refused(tmp_path):
    assert "File name too long" in refused(tmp_path, "recipe=quick", f"run.name={'n' * 300}")


def test_all_unknown_names_share_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--bf16", "--lr", "1e-3"]) == 2
    said = capsys.readouterr().err
    assert "there is no flag --bf16." in said
    assert "without dashes:  optimizer.learning_rate=1e-3" in said
    assert said.count("Flags: ") == 1
    assert main(["foo=1", "bar=2"]) == 2
    said = capsys.readouterr().err
    assert "no group foo" in said
    assert "no group bar" in said
    assert said.count("Groups: ") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "run.steps=1,x"], "run.steps=x: expected an integer"),
        (["data.path=nothing.txt"], "nothing.txt"),
        (["--hlep"], "there is no flag --hlep."),
        (["optimizer=adam"], "optimizer=adam is not available here."),
    ],
)
def test_train_process_refuses_invalid_arguments(tmp_path, words, message):
    assert message in refused(tmp_path, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--validation.steps", "8"], "Did you mean validate.samples?"),
        (["validation.steps=8"], "Did you mean validate.samples?"),
        (["--seed", "3"], "Set options without dashes:  run.seed=3"),
        (["--min-lr", "3e-5"], "Type  schedule.final=N  (schedule.final = min_lr / learning_rate)"),
        (["--end_lr=0"], "Type  schedule.final=N  (schedule.final = min_lr / learning_rate)"),
        (["final_lr=3e-5"], "schedule.final = min_lr / learning_rate"),
        (["schedule.min_lr=3e-5"], "schedule.final = min_lr / learning_rate"),
        (["--epochs", "3"], "Type  run.steps=N  (N = epochs x "),
        (["--optimizer.beta1=0.9"], "Type  optimizer.betas=[0.9,0.95]  (a pair: "),
        (["--adam-beta2", "0.95"], "Type  optimizer.betas=[0.9,0.95]  (a pair: "),
        (["optimizer.beta2=0.95"], "Type  optimizer.betas=[0.9,0.95]  (a pair: "),
        (["dataloader_num_workers=4"], "Leave it out: threads prefetch"),
        (["--num-workers", "0"], "Leave it out: threads prefetch"),
        (["--untie-embeddings-and-output-weights"], "Type  model.tied=false"),
        (["bf16.enabled=true"], "Type  precision=bf16"),
        (["bf16.enabled=false"], "Leave it out: it is off by default  (to turn it on: precision=bf16)"),
        (["--fp16", "0"], "Leave it out: it is off by default  (to turn it on: precision=fp16)"),
        (["wandb.enabled=false"], "Leave it out: it is off by default  (to turn it on: track=[console,jsonl,wandb])"),
        (["--metrics.enable_wandb=false"], "Leave it out: it is off by default"),
        (["gradient_checkpointing=False"], "Leave it out: it is off by default  (to turn it on: run.recompute=full"),
        (["fsdp=none"], "(to turn it on: parallel=fsdp launch.processes=N)"),
        (["communication_data_type=fp32"], "Leave it out: it is off by default  (to turn it on: gradients=bf16)"),
        (["gradient_checkpointing=fp32"], "Type  run.recompute=full"),
        (["communication_data_type=fp16"], "Type  gradients=NAME"),
        (["--training.mixed_precision_param=float32"], "Type  precision=fp32"),
        (["--training.mixed_precision_param=bfloat16"], "Type  precision=bf16"),
        (["report_to=mlflow"], "Type  track=[console,jsonl,mlflow]"),
        (["report_to=[comet]"], "Type  track=[console,jsonl,NAME]"),
        (["--report_to", "none"], "(to turn it on: track=[console,jsonl,wandb])"),
        (["metrics.enable_tensorboard=false"], "Type  track=[console,jsonl]"),
        (["checkpoint.enable=false"], "Type  checkpoint=off"),
        (["checkpoint.async_mode=disabled"], "(to turn it on: checkpoint=zarr)"),
        (["lr_scheduler_type=cosine"], "Type  schedule=cosine"),
        (["--data_parallel_shard_degree", "2"], "Did you mean parallel.dp_shard?"),
        (["--use-flash-attn"], "Leave it out: attention takes a fast kernel"),
        (["attn_implementation=sdpa"], "Leave it out: attention takes a fast kernel"),
        (["--fsdp_offload_params"], "Type  parallel=fsdp parallel.offload=true"),
        (["training.enable_cpu_offload=true"], "Type  parallel=fsdp parallel.offload=true"),
        (["torch_dtype=bfloat16"], "Type  precision=bf16"),
        (["amp=true"], "Type  precision=NAME  (fp32, fp64, bf16, fp16, fp8)"),
        (["optimizer.name=AdamW"], "Type  optimizer=adamw"),
        (["optimizer.type=foo"], "Type  optimizer=NAME  (adamw, "),
        (["deepspeed=ds.json"], "keys of the JSON file: docs/migrate/deepspeed.md"),
        (["--num_nodes", "2"], "Type  launch=elastic launch.nodes=N"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_option_of_another_tool_gets_answer_for_value(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_recipe_with_minimum_learning_rate_explains_fraction(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("schedule: {min_lr: 3e-5}\n")
    assert main(["recipe=mine.yaml", "--cfg", "job"]) == 2
    assert "schedule.final = min_lr / learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["schedule=cosin", "schedule.final=0.2"], "schedule=cosin"),
        (["track=[jsonll]", "track.jsonll.path=x"], "track=jsonll"),
        (["moe=on", "moe.k=2", "moe.router.top=1"], "moe=on"),
    ],
)
def test_unavailable_part_with_options_gives_one_problem(capsys, words, part):
    assert main([*words, "--cfg", "job"]) == 2
    assert capsys.readouterr().err.startswith(f"train: {part} is not available here.\n")


def test_unavailable_part_does_not_hide_unknown_option(capsys):
    assert main(["schedule=cosin", "optimizer.learning_rat=1", "--cfg", "job"]) == 2
    said = capsys.readouterr().err
    assert "1. schedule=cosin is not available here." in said
    assert "2. there is no option optimizer.learning_rat." in said


def test_recipe_with_synonym_suggests_option_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("optimizer: {lr: 1}\n")
    assert main(["recipe=mine.yaml", "--cfg", "job"]) == 2
    assert "Did you mean optimizer.learning_rate?" in capsys.readouterr().err


def test_synonyms_are_unique_and_refer_to_options():
    known = {
        f"{place}.{name}"
        for place, classes in {
            **{section: [cls] for section, cls in SECTIONS.items()},
            **{group: [offer.part.config for offer in installed().get_offers(group).values()] for group in GROUPS},
        }.items()
        for cls in classes
        for name in get_defaults(cls)
    }
    core_options = {path: words for path, words in catalogue.SYNONYMS.items() if path in known}
    assert {"run.steps", "optimizer.learning_rate", "launch.processes"} <= set(core_options)
    theirs = [word for words in core_options.values() for word in words.split()]
    assert len(theirs) == len(set(theirs))
    assert not {path.rpartition(".")[2] for path in known} & set(theirs)


def test_part_of_broken_package_is_refused(tmp_path, strangers):
    strangers.add(
        "gangline-ckpt-zarr", "import zarr_that_is_missing\n", version="0.2.1", requires="zarr-that-is-missing>=3.1"
    )
    said = refused(tmp_path, "checkpoint=zarr", strangers=strangers)
    assert "gangline-ckpt-zarr 0.2.1 is installed but failed to import" in said
    assert "gangline-ckpt-zarr requires zarr-that-is-missing>=3.1" in said


def test_part_of_outdated_package_is_refused(tmp_path, strangers):
    strangers.add("gangline-ckpt-zarr", "raise SystemExit\n", version="0.0.4", contract="v0")
    said = refused(tmp_path, "checkpoint=zarr", strangers=strangers)
    assert "gangline-ckpt-zarr 0.0.4 implements plugin contract v0, but this gangline supports v1" in said
    assert "pip install --upgrade gangline-ckpt-zarr" in said


def test_part_of_duplicate_package_is_refused(tmp_path, strangers):
    strangers.add("gangline-ckpt-zarr", ZARR, plugin="zarr", version="1.0")
    strangers.add("zarr-fork", ZARR, plugin="zarr", version="2.0")
    said = refused(tmp_path, "checkpoint=zarr", strangers=strangers)
    assert "two installed packages claim the plugin name 'zarr': gangline-ckpt-zarr 1.0, zarr-fork 2.0." in said


@pytest.fixture
def run(tmp_path):
    from gangline.config.defaults import build_default_run

    made = RunDirectory.create(build_default_run(run={"dir": str(tmp_path / "out")}))
    made.unlock()
    return made


def test_resume_from_half_written_directory_is_refused(tmp_path, run):
    run.config.write_text(run.config.read_text()[:200])
    assert "is truncated" in refused(tmp_path, "resume=out")
    run.config.unlink()
    assert "config.yaml is missing" in refused(tmp_path, "resume=out")


def test_resume_with_another_model_is_refused(tmp_path, run):
    said = refused(tmp_path, "resume=out", "model=gpt2-124m")
    assert "a resumed run cannot change model (tiny -> gpt2-124m)" in said.replace("model.dim", "")
    assert "Options that may change" in said


def test_directory_that_holds_a_run_is_refused(tmp_path, run):
    assert "already holds a run" in refused(tmp_path, "run.dir=out")


def test_second_train_on_a_directory_is_refused(tmp_path, run):
    run.lock()
    try:
        said = refused(tmp_path, "resume=out")
    finally:
        run.unlock()
    assert f"is in use by another train command: pid {os.getpid()} on " in said


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["plugin"], ["there is no verb 'plugin'.", "Did you mean plugins?"]),
        (["train"], ["there is no verb 'train'.", "To train:  train --help"]),
        (["resume", "runs/a"], ["there is no verb 'resume'.", "To continue a run:  train resume=runs/a"]),
        (["run.steps=5", "moe=on"], ["To train:  train run.steps=5 moe=on"]),
        (["train", "data.path=a b"], ["To train:  train 'data.path=a b'"]),
    ],
)
def test_unknown_command_is_refused_with_hint(tmp_path, words, messages):
    said = refused(tmp_path, *words, module="gangline")
    for message in messages:
        assert message in said


def test_plugins_with_unknown_group_lists_groups(tmp_path):
    said = refused(tmp_path, "plugins", "optimiser", module="gangline.cli.main")
    assert said.startswith(
        "gangline plugins: there is no group 'optimiser'.\n  Did you mean optimizer?\n  Groups: model,"
    )


@pytest.mark.parametrize("words", [[], ["recipe=quick"]], ids=["none", "recipe"])
def test_unknown_plugin_in_environment_is_refused_once(tmp_path, monkeypatch, words):
    monkeypatch.setenv("GANGLINE_PLUGINS", "bascis")
    assert refused(tmp_path, *words).splitlines() == [
        "train: GANGLINE_PLUGINS names 'bascis', which is not installed.",
        "  Did you mean basics? Installed plugins: basics, testkit.",
    ]


def test_synonyms_of_installed_parts_are_suggested(tmp_path, strangers):
    source = """
from dataclasses import dataclass
from gangline import Part, hookimpl
from gangline.config.schema import OptimizerConfig, TrackConfig

@dataclass
class Own(OptimizerConfig):
    own_rate: float = 0.1

@dataclass
class OwnTrack(TrackConfig):
    own_pace: int = 1

@hookimpl
def gangline_optimizers():
    about = {"synonyms": {"own_rate": "frobnication frob"}, "words": {"frobber frobbing": "optimizer=own"}}
    yield Part(name="own", config=Own, build="a:b", summary="Own", **about)

@hookimpl
def gangline_trackers():
    yield Part(name="own", config=OwnTrack, build="a:b", summary="Own", synonyms={"own_pace": "dingdong"})
"""
    strangers.add("gangline-own", source)
    said = refused(tmp_path, "optimizer=own", "optimizer.frob=1", "track=[own]", "dingdong=2", strangers=strangers)
    assert "Did you mean optimizer.own_rate?" in said
    assert "Did you mean track.own.own_pace?" in said
    said = refused(tmp_path, "optimizer=frobber", "frobbing=1", strangers=strangers)
    assert said.count("Type  optimizer=own") == 2


def test_plugins_reports_name_conflict_and_exits_with_2(tmp_path, strangers):
    strangers.add("gangline-ckpt-zarr", ZARR, plugin="zarr", version="1.0")
    strangers.add("zarr-fork", ZARR, plugin="zarr", version="2.0")
    strangers.add("gangline-broken", "import nowhere_to_be_found\n")
    done = command("gangline.cli.main", "plugins", cwd=tmp_path, strangers=strangers)
    assert done.returncode == 2
    assert done.stdout.count("two installed packages claim the plugin name 'zarr'") == 1
    assert "gangline-broken 0.1.0 is installed but failed to import" in done.stdout
    assert "adamw" in done.stdout


def test_missing_torch_is_one_message(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gangline.cli.train.find_spec", lambda name: None)
    assert main(["recipe=quick", "run.dir=here"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("train: torch is not installed in ")
    assert "pip install 'torch>=2.11,<2.14' && train resume=here" in said
