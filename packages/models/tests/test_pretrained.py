"""External weights at the start of a run, and exported EMA weights at its end, from the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from gangline.cli.main import main
from gangline.cli.train import main as train
from gangline.config.check import find_problems
from gangline.config.compose import compose_one
from gangline.errors import UserError
from gangline.model.pretrained import find_pretrained
from gangline_models.hugging_face.commands import export_run
from gangline_models.hugging_face.config import make_run_config_json, read_model_config
from gangline_models.hugging_face.pretrained import HuggingFace
from gangline_testkit import as_installed
from gangline_testkit.sessions import open_session, train_session


def test_hub_name_as_weights_prints_download_command(capsys):
    assert train(["model.weights=meta-llama/Llama-3.2-1B"]) == 2
    assert "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B" in capsys.readouterr().err


def test_missing_weights_directory_is_refused():
    (problem,) = find_problems(compose_one(["model.weights=/nowhere"]))
    assert [word in problem.what for word in ("model.weights", "/nowhere")] == [True, True]
    assert "config.json" in problem.what + problem.why


def test_commands_and_configurations_need_no_torch():
    code = (
        "import sys\n"
        "import gangline_models.hugging_face.commands, gangline_models.families.decoder\n"
        "from gangline_models.hugging_face.pretrained import HuggingFace\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


STRANGERS = """
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.config import ModelConfig
from gangline_basics.model.config import DecoderConfig


@dataclass
class Variant(DecoderConfig):
    pass


@dataclass
class Own(ModelConfig):
    def get_weights_directory(self):
        return "somewhere"


@hookimpl
def gangline_models():
    for config in (Variant, Own):
        name, build = config.__name__.lower(), "gangline_basics.model.plan:plan_decoder"
        yield Part(name=name, config=config, build=build, summary=name)
"""


THIRD_PARTY = """
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline_basics.model.config import Tiny
from gangline_models.hugging_face.contract import ModelFormat


@dataclass
class Mine(Tiny):
    pass


class MineFormat(ModelFormat):
    architectures = ("MineForCausalLM",)

    def read(self, directory, config):
        return Mine(dim=config["width"], weights=str(directory))

    def write(self, options, dtype, max_position):
        return {"architectures": ["MineForCausalLM"], "width": options.dim}

    def describe(self, options):
        return {"dim": options.dim}


@hookimpl
def gangline_models():
    yield Part(
        name="mine",
        config=Mine,
        build="gangline_basics.model.plan:plan_decoder",
        summary="Mine",
        capabilities={"hugging_face": "third_party:MineFormat"},
    )
"""


def test_derived_decoder_config_reads_hugging_face_weights(tmp_path):
    (tmp_path / "stranger_models.py").write_text(STRANGERS)
    with as_installed("gangline-strangers", "stranger_models", path=tmp_path):
        assert isinstance(find_pretrained(compose_one(["model=variant"]).model), HuggingFace)
        (problem,) = find_problems(compose_one(["model=own"]))
    assert "model=own cannot read the pretrained weights in somewhere" in problem.what
    assert "capability 'pretrained'" in problem.why


def test_import_finds_third_party_model_format(tmp_path):
    (tmp_path / "third_party.py").write_text(THIRD_PARTY)
    (tmp_path / "config.json").write_text('{"architectures": ["MineForCausalLM"], "width": 64}')
    with as_installed("gangline-third-party", "third_party", path=tmp_path):
        found = read_model_config(tmp_path)
        assert (type(found).__name__, found.dim, found.weights) == ("Mine", 64, str(tmp_path))
        run = compose_one(["model=mine", "model.dim=96"])
        assert make_run_config_json(run, "run", "bfloat16") == {"architectures": ["MineForCausalLM"], "width": 96}
    with pytest.raises(UserError, match="architecture MineForCausalLM"):
        read_model_config(tmp_path)


def test_ema_weights_are_exported_by_prefix(tmp_path):
    out = tmp_path / "run"
    ema = ("callback=ema", "callback.ema.decays=[0.9]")
    train_session(out, *ema, "run.steps=3")
    prefix = "callback/ema/0.9"
    export_run([str(out), str(tmp_path / "theirs"), "--weights", prefix])
    export_run([str(out), str(tmp_path / "own")])
    theirs, own = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "own"))
    name = "model.layers.1.mlp.gate_proj.weight"
    (average,) = (
        shard.local.float()
        for shard in open_session(out, *ema).shards()
        if shard.name == f"{prefix}/blocks.1.feed_forward.w_gate.weight"
    )
    torch.testing.assert_close(theirs[name], average)
    assert theirs.keys() == own.keys()
    assert not torch.equal(theirs[name], own[name])


@pytest.mark.parametrize("wrong", [["--shard-gb", "nan"], ["--shard-gb", "0"], ["--merge", "--adapter-only", "lora"]])
def test_export_refuses_invalid_arguments(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path), str(tmp_path / "out"), *wrong])
    assert ended.value.code == 2
    assert wrong[-2] in capsys.readouterr().err


def test_export_of_damaged_checkpoint_is_refused(tmp_path, capsys):
    train_session(tmp_path / "run", "run.steps=2", "checkpoint.every=1")
    for file in (tmp_path / "run" / "checkpoints" / "step-00000002").rglob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    words = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "is damaged" in told
    assert "--checkpoint" in told
    assert not (tmp_path / "out").exists()
    assert main([*words, "--checkpoint", "step-00000001"]) == 0


def test_missing_gangline_models_names_package_to_install(tmp_path):
    """Run `train` with core and basics only and request pretrained weights."""
    code = (
        "import os, sys\n"
        "sys.modules['gangline_models'] = None\n"
        "os.environ['GANGLINE_PLUGINS'] = 'basics'\n"
        "from gangline.cli.train import main\n"
        "sys.exit(main(['model.weights=/tmp']))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 2, ran.stderr
    assert "gangline-models, which is not installed" in ran.stderr
    assert "pip install" in ran.stderr
    assert list(tmp_path.iterdir()) == []
