"""`checkpoint.save_frozen=false`: checkpoints of trained weights only, and the search for the base weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import SHORT, llama, logits, opened

from gangline.cli.main import main
from gangline_basics.sampling.sampler import sample
from gangline_testkit import RealRuns

SETTINGS = (*SHORT, "run.steps=2", "lora=on", "lora.rank=4", "checkpoint.every=2")
ALONE = "checkpoint.save_frozen=false"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    with RealRuns(folder, SETTINGS) as found:
        found.base = llama(folder / "base")
        yield found


def nbytes(directory) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def merged(runs, name: str) -> torch.Tensor:
    here = runs.directory
    shutil.rmtree(here / f"{name}-merged", ignore_errors=True)
    assert main(["export", str(here / name), str(here / f"{name}-merged"), "--merge"]) == 0
    return logits(opened(here / f"{name}-merged"))


def test_export_initializes_each_base_array_once(runs, monkeypatch):
    from gangline.model import init_weights

    runs.train("run.dir=once", *runs.base, ALONE)
    drawn: list[str] = []

    def counted(run, shards, plan, draw=init_weights.draw_weights):
        drawn.extend(shard.name for shard in shards)
        draw(run, shards, plan)

    monkeypatch.setattr(init_weights, "draw_weights", counted)
    for words in (["--merge"], ["--adapter-only", "lora"]):
        drawn.clear()
        assert main(["export", str(runs.directory / "once"), str(runs.directory / f"once{words[0]}"), *words]) == 0
        assert len(drawn) == len(set(drawn)) > 10, sorted(drawn)


@pytest.mark.parametrize("base", ["full", "8bit", "drawn"])
def test_resume_from_adapter_checkpoint_matches_complete_checkpoint(runs, base):
    words = ["lora.base=8bit", *runs.base] if base == "8bit" else runs.base if base == "full" else ["recipe=quick"]
    names = (f"{base}-alone", f"{base}-whole")
    runs.train(f"run.dir={names[0]}", *words, ALONE)
    runs.train(f"run.dir={names[1]}", *words)
    small, large = (nbytes(runs.directory / name / "checkpoints") for name in names)
    assert small < (0.7 if base == "8bit" else 0.6) * large
    runs.train(f"resume={names[0]}", "run.steps=4", "parallel=ddp", "launch.processes=2")
    runs.train(f"resume={names[1]}", "run.steps=4", "parallel=ddp", "launch.processes=2")
    ours, theirs = map(runs.read_records, names)
    assert [record["loss"] for record in ours] == [record["loss"] for record in theirs]
    if base != "drawn":
        assert torch.equal(merged(runs, names[0]), merged(runs, names[1]))
    places = [runs.directory / name for name in names]
    assert sample(places[0], "a", 8, temperature=0.0) == sample(places[1], "a", 8, temperature=0.0)
    runs.train(f"resume={names[0]}", "run.steps=5", "checkpoint.save_frozen=true")  # later checkpoints are complete
    assert nbytes(places[0] / "checkpoints" / "step-00000005") > 1.3 * nbytes(
        places[0] / "checkpoints" / "step-00000004"
    )


def test_missing_or_changed_base_is_refused(runs, capsys):
    here = runs.directory
    shutil.copytree(here / "base", here / "moved")
    words = [word.replace(str(here / "base"), str(here / "moved")) for word in runs.base]
    runs.train("run.dir=of-moved", *words, ALONE)
    path = here / "moved" / "model.safetensors"
    kept = path.read_bytes()

    def told(*verb: str) -> str:
        capsys.readouterr()
        assert main(list(verb)) == 2
        return capsys.readouterr().err

    def refused_by_all(*texts: str) -> None:
        ways = [
            told("sample", str(here / "of-moved"), "--tokens", "2"),
            told("export", str(here / "of-moved"), str(here / "never"), "--merge"),
            runs.expect_refusal("resume=of-moved", "run.steps=4"),
        ]
        for said in ways:
            assert "Traceback" not in said, said
            for text in texts:
                assert text in said, said

    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    refused_by_all(
        "was trained with frozen base weights that differ from the current base weights", str(here / "moved")
    )
    path.unlink()
    refused_by_all("the frozen base weights that", "leaves out cannot be recreated", str(here / "moved"))
    path.write_bytes(kept)
    runs.train("resume=of-moved", "run.steps=4")
    assert json.loads((here / "of-moved" / "ending.json").read_text())["exit_code"] == 0


def test_complete_checkpoint_is_kept_if_base_is_missing(runs):
    """Resume without saving the base, when the base has changed or is gone and only the checkpoint has it."""
    here = runs.directory
    shutil.copytree(here / "base", here / "lent")
    words = [word.replace(str(here / "base"), str(here / "lent")) for word in runs.base]
    runs.train("run.dir=of-lent", *words, "checkpoint.keep_last=1")
    on = ("resume=of-lent", "run.steps=4", ALONE, "checkpoint.keep_last=1")
    path = here / "lent" / "model.safetensors"
    kept = path.read_bytes()
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    said = runs.expect_refusal(*on)
    assert (
        "checkpoint.save_frozen=false: the base weights of this run differ from the weights that are now in" in said
    ), said
    path.rename(here / "away")
    said = runs.expect_refusal(*on)
    assert "checkpoint.save_frozen=false: the frozen base weights of this run cannot be recreated" in said, said
    assert "Traceback" not in said, said
    places = sorted(place.name for place in (here / "of-lent" / "checkpoints").glob("step-*"))
    assert places == ["step-00000002"]
    path.write_bytes(kept)
    runs.train(*on)
    places = sorted(place.name for place in (here / "of-lent" / "checkpoints").glob("step-*"))
    assert places == ["step-00000004"]
    assert isinstance(sample(here / "of-lent", "a", 2, temperature=0.0), str)


def test_initial_adapter_may_be_deleted(runs):
    """Check that checkpoints contain the adapter, so that only the base is read again."""
    here = runs.directory
    runs.train("run.dir=first", *runs.base)
    assert main(["export", str(here / "first"), str(here / "adapter"), "--adapter-only", "lora"]) == 0
    runs.train("run.dir=second", *runs.base, "lora.adapter=adapter", ALONE)
    wanted = merged(runs, "second")
    shutil.rmtree(here / "adapter")
    assert torch.equal(merged(runs, "second"), wanted)
    sample(here / "second", "a", 2)
    runs.train("resume=second", "run.steps=4")


def test_fingerprint_depends_on_values_but_not_sharding():
    from gangline.checkpoint.array_sums import compute_fingerprint
    from gangline.shard import Shard

    torch.manual_seed(0)
    w, stack = torch.randn(6, 5), torch.randn(2, 4, 3)

    def shard(name, whole, offset, shape, primary=True):
        part = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].clone()
        return Shard(name, tuple(whole.shape), part.dtype, offset, part, primary)

    whole = compute_fingerprint(
        ["model/w", "model/s"], [shard("model/w", w, (0, 0), (6, 5)), shard("model/s", stack, (0, 0, 0), (2, 4, 3))]
    )
    parts = [
        shard("model/s", stack, (1, 0, 0), (1, 4, 3)),
        shard("model/w", w, (0, 3), (6, 2)),
        shard("model/w", w, (0, 0), (2, 3)),
        shard("model/w", w, (2, 0), (4, 3)),
        shard("model/w", w, (2, 0), (4, 3), primary=False),
        shard("model/s", stack, (0, 2, 0), (1, 2, 3)),
        shard("model/s", stack, (0, 0, 0), (1, 2, 3)),
    ]
    assert compute_fingerprint(["model/s", "model/w"], parts) == whole
    assert (
        compute_fingerprint(
            ["model/w", "model/s"], [shard("model/w", w.flip(0), (0, 0), (6, 5)), *parts[:1], *parts[5:]]
        )
        != whole
    )
    assert (
        compute_fingerprint(
            ["model/w", "model/s"], [shard("model/w", w.bfloat16(), (0, 0), (6, 5)), *parts[:1], *parts[5:]]
        )
        != whole
    )
