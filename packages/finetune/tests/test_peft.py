"""Adapters as PEFT files: PEFT opens exported adapters, and training continues from adapters of PEFT."""

from __future__ import annotations

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from small_models import SHORT, llama, logits, opened

from gangline.cli.main import main
from gangline_testkit import RealRuns

SETTINGS = (*SHORT, "run.steps=3")
KINDS = {
    "lora": ("lora.targets=[wq,w_down]",),
    "rslora": ("lora.rslora=true", "lora.rank=3"),
    "dora": ("lora.dora=true", "lora.alpha=5"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft")
    base = llama(folder / "base")
    with RealRuns(folder, SETTINGS) as found:
        found.settings = (*found.settings, *base)
        yield found


def gangline(*words: object) -> None:
    assert main(list(map(str, words))) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_peft_adapter_and_merged_export_match(runs, kind):
    here = runs.directory
    runs.train(f"run.dir={kind}", "lora=on", "lora.rank=4", *KINDS[kind])
    gangline("export", here / kind, here / f"{kind}-adapter", "--adapter-only", "lora")
    gangline("export", here / kind, here / f"{kind}-merged", "--merge")
    base = logits(opened(here / "base"))
    adapted = logits(PeftModel.from_pretrained(opened(here / "base"), here / f"{kind}-adapter"))
    merged = logits(opened(here / f"{kind}-merged"))
    assert not torch.allclose(base, adapted, atol=1e-2), "training changed nothing"
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-5)


def test_peft_finds_base_of_exported_adapter(runs):
    here = runs.directory
    runs.train("run.dir=named", "lora=on")
    gangline("export", here / "named", here / "named-adapter", "--adapter-only", "lora")
    found = logits(AutoPeftModelForCausalLM.from_pretrained(here / "named-adapter"))
    wanted = logits(PeftModel.from_pretrained(opened(here / "base"), here / "named-adapter"))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert PeftConfig.from_pretrained(here / "named-adapter").base_model_name_or_path == str(here / "base")


@pytest.mark.parametrize("dora", [False, True])
def test_peft_adapter_survives_import_and_export(runs, dora):
    here, name = runs.directory, f"theirs-{dora}"
    torch.manual_seed(1)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"], use_dora=dora, task_type="CAUSAL_LM")
    model = get_peft_model(opened(here / "base"), config)
    for part, parameter in model.named_parameters():
        if "lora_B" in part or "magnitude" in part:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(here / name)
    words = ("lora=on", "lora.rank=3", "lora.alpha=7", f"lora.dora={str(dora).lower()}", "lora.targets=[wq,w_up]")
    runs.train(f"run.dir=on-{name}", *words, f"lora.adapter={name}", "optimizer.learning_rate=0", "run.steps=1")
    gangline("export", here / f"on-{name}", here / f"on-{name}-merged", "--merge")
    torch.testing.assert_close(logits(opened(here / f"on-{name}-merged")), logits(model), rtol=1e-5, atol=1e-5)
    gangline("export", here / f"on-{name}", here / f"on-{name}-adapter", "--adapter-only", "lora")
    back, there = (load_file(here / of / "adapter_model.safetensors") for of in (f"on-{name}-adapter", name))
    assert back.keys() == there.keys()
    for tensor in there:
        torch.testing.assert_close(back[tensor], there[tensor])


def test_incompatible_adapter_is_refused(runs):
    here = runs.directory
    torch.manual_seed(1)
    llama(here / "wider", hidden=64)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    get_peft_model(opened(here / "wider"), config).save_pretrained(here / "of-wider")
    words = ("lora=on", "lora.rank=3", "lora.alpha=7", "lora.targets=[wq,w_up]", "lora.adapter=of-wider")
    said = runs.expect_refusal("run.dir=no", *words)
    assert "layers.0.mlp.up_proj.lora_B.weight has shape (64, 3)" in said, said
    assert "the shape must be (48, 3)" in said, said
    said = runs.expect_refusal("run.dir=no", *words, "lora.rank=4")
    assert "r=3" in said, said
    assert "lora.rank=3" in said, said
    said = runs.expect_refusal("run.dir=no", *words, "lora.targets=[wq]")
    assert "more tensors match no parameter of this model" in said, said
    path = here / "of-wider" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rank_pattern": {"q_proj": 9}}))
    assert "rank_pattern" in runs.expect_refusal("run.dir=no", *words)
    assert "is not a peft adapter" in runs.expect_refusal("run.dir=no", *words[:-1], "lora.adapter=base")


@pytest.fixture
def adapter(runs, tmp_path):
    """Write a peft adapter and return (path of its config, overrides of a run that starts from it)."""
    config = LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(opened(runs.directory / "base"), config).save_pretrained(tmp_path / "ad")
    path = tmp_path / "ad" / "adapter_config.json"
    return path, ("lora=on", "lora.rank=3", "lora.alpha=8", "lora.targets=[wq]", f"lora.adapter={path.parent}")


def test_unsupported_adapter_config_is_refused(runs, adapter):
    path, words = adapter
    plain = json.loads(path.read_text())
    for name, value in (
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("loftq_config", {"loftq_bits": 4}),
        ("lora_ga_config", {"direction": "x"}),
        ("use_qalora", True),
        ("something_new", 1),
        ("bias", "all"),
    ):
        path.write_text(json.dumps({**plain, name: value}))
        assert f"has the unsupported setting {name}=" in runs.expect_refusal("run.dir=no", *words), name
    for value in (True, False, "gaussian"):
        path.write_text(json.dumps({**plain, "init_lora_weights": value}))
        assert "has use_dora=False" in runs.expect_refusal(
            "run.dir=no", *words, "lora.dora=true"
        )  # init_lora_weights was accepted


def test_absent_adapter_fields_use_peft_defaults(runs, adapter):
    path, words = adapter
    said = {"peft_type": "LORA", "r": 3, "target_modules": ["q_proj"]}
    path.write_text(json.dumps(said))
    runs.train("run.dir=silent", *words, "run.steps=1")
    refused = runs.expect_refusal("run.dir=no", *words, "lora.alpha=16", "lora.dora=true")
    assert "lora_alpha=8" in refused, refused
    assert "use_dora=False" in refused, refused


def test_damaged_adapter_files_are_refused(runs, adapter):
    path, words = adapter
    plain, weights = path.read_text(), path.with_name("adapter_model.safetensors")
    sound = weights.read_bytes()
    path.write_text("[]")
    assert "adapter_config.json cannot be read" in runs.expect_refusal("run.dir=no", *words)
    path.write_text(plain)
    for damaged in ((2).to_bytes(8, "little") + b"[]", sound[:-1], b""):
        weights.write_bytes(damaged)
        assert "adapter_model.safetensors cannot be read" in runs.expect_refusal("run.dir=no", *words)
    weights.unlink()
    assert "adapter_model.safetensors cannot be read" in runs.expect_refusal("run.dir=no", *words)


def test_adapter_path_expands_home_directory(runs, adapter, monkeypatch):
    path, words = adapter
    monkeypatch.setenv("HOME", str(path.parent.parent))
    runs.train("run.dir=home", *words[:-1], "lora.adapter='~/ad'", "run.steps=1")
