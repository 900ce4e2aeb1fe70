"""`lora=on` on models with multi-token prediction modules: layouts, trained weights, export."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from gangline.cli.main import main
from gangline_models.hugging_face.commands import list_overrides
from gangline_testkit import RealRuns

LAYERS, DEPTH = 2, 2
SETTINGS = (
    *("recipe=quick", "precision=fp64", "batch.global_size=4", "batch.sequence_length=32", "run.steps=3"),
    *("run.sample=0", "validate.every=null"),
    *("track=[jsonl]", "track.jsonl.figure=false", "schedule=constant", "optimizer.learning_rate=0.02"),
)
DEEPSEEK = (
    *("model=deepseek_v3", f"model.layers={LAYERS}", "model.dim=32", "model.heads=4", "model.ffn_dim=48"),
    *("model.vocab_size=256", "model.q_rank=8", "model.kv_rank=8", "model.nope_dim=4", "model.rope_dim=4"),
    *("model.v_dim=8", "mtp=on", f"mtp.depth={DEPTH}"),
)
LAYOUTS = {
    "zero 3": ("parallel=fsdp", "launch.processes=2"),
    "tp": ("parallel=tp", "launch.processes=2"),
    "pp": ("parallel=3d", "parallel.pp=2", "launch.processes=2"),
}
TRUNK = "lora.targets=['blocks.*.*.*']"  # linears of the blocks, not of the MTP modules


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    with RealRuns(folder, SETTINGS) as found:
        found.train("run.dir=first", *DEEPSEEK)
        assert main(["export", str(folder / "first"), str(folder / "base")]) == 0
        found.settings = (*SETTINGS, *list_overrides(folder / "base"), "lora=on", "lora.rank=4")
        assert {"mtp=on", f"mtp.depth={DEPTH}"} < set(found.settings)
        yield found


def trained(runs: RealRuns, name: str, *words: str) -> list[dict]:
    if not (runs.directory / name).exists():
        runs.train(f"run.dir={name}", *words)
    return runs.read_records(name)


def exported(runs: RealRuns, name: str, *how: str) -> dict[str, torch.Tensor]:
    out = runs.directory / f"{name}-{how[-1].strip('-')}"
    if not out.exists():
        assert main(["export", str(runs.directory / name), str(out), *how]) == 0
    return load_file(next(out.glob("*.safetensors")))


def of_modules(name: str) -> bool:
    return any(f"model.layers.{LAYERS + index}." in name for index in range(DEPTH))


@pytest.mark.parametrize("layout", ["zero 3", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("tp", "pp"))])
def test_mtp_fine_tuning_matches_one_process(runs, layout):
    wanted = trained(runs, "one")
    assert wanted[0]["loss"] > wanted[-1]["loss"]
    for ours, theirs in zip(trained(runs, layout.replace(" ", "-"), *LAYOUTS[layout]), wanted, strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-10), key
        for key in ("mtp_loss", "mtp/1", "mtp/2"):
            assert ours["metrics"][key] == pytest.approx(theirs["metrics"][key], rel=1e-10), key


def test_mtp_adapters_round_trip_through_export(runs):
    """Check that a merged export changes only linears with adapters, and that exported adapters load unchanged."""
    trained(runs, "one")
    before, merged = load_file(runs.directory / "base" / "model.safetensors"), exported(runs, "one", "--merge")
    assert before.keys() == merged.keys()
    changed = {name for name in before if not before[name].equal(merged[name])}
    for name, w in before.items():
        linear = w.dim() > 1 and "embed_tokens" not in name and not name.startswith("lm_head")
        assert (name in changed) == linear, name
    assert any(map(of_modules, changed))
    exported(runs, "one", "--adapter-only", "lora")
    adapter = f"lora.adapter={runs.directory}/one-lora"
    runs.train("run.dir=on", adapter, "run.steps=1", "optimizer.learning_rate=0")
    again = exported(runs, "on", "--merge")
    assert all(again[name].equal(merged[name]) for name in merged)


def test_mtp_modules_without_adapters_export_unchanged(runs):
    trained(runs, "trunk", TRUNK)
    before, merged = load_file(runs.directory / "base" / "model.safetensors"), exported(runs, "trunk", "--merge")
    assert before.keys() == merged.keys()
    assert any(map(of_modules, before))
    assert all(before[name].equal(merged[name]) for name in before if of_modules(name))
    assert not before["model.layers.0.mlp.up_proj.weight"].equal(merged["model.layers.0.mlp.up_proj.weight"])
