"""`gangline ckpt export` and `import`: weights to and from Hugging Face, in bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made import save
from safetensors.torch import load_file, save_file

from gangline.cli.main import main
from gangline.config.compose import compose_one
from gangline.config.serial import to_dict
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.model.tree import get_parameter_shapes
from gangline.shard import Division, Layout, Registry
from gangline_ckpt_zarr.commands.where import find_place
from gangline_models.families.decoder import make_config_json
from gangline_models.hugging_face.names import find_hf_tensors
from gangline_testkit import warm

MODEL = (
    *("model=decoder", "model.vocab_size=256", "model.dim=24", "model.layers=2", "model.heads=4"),
    *("model.kv_heads=2", "model.ffn_dim=40", "model.qk_norm=true"),
)


def drawn(name: str, layout: Layout) -> torch.Tensor:
    return torch.randn(layout.shape, generator=torch.Generator().manual_seed(sum(name.encode())))


@pytest.fixture(scope="module")
def run():
    return compose_one([*MODEL, "checkpoint=zarr", "batch.sequence_length=32"])


@pytest.fixture
def trained(run, tmp_path) -> tuple[str, Registry]:
    """Return a checkpoint of two ranks, sharded by rows, with optimizer state next to the model, and its registry."""
    tree, _ = compose_model(run)
    layouts = {}
    for name, shape in get_parameter_shapes(tree).items():
        rows = Division(("dp_shard",), ((0, shape[0] // 2, shape[0]),), rows=len(shape) > 1)
        divisions = (rows,) if len(shape) > 1 else ()
        layouts[f"model/{name}"] = layouts[f"optimizer/exp_avg/{name}"] = Layout(shape, "float32", divisions)
    registry = Registry.of(Mesh.of({"dp_shard": 2}), layouts)
    place = str(tmp_path / "run" / "step-00000007")
    save(place, registry, drawn, {"step": 7, "config": to_dict(run)})
    return place, registry


def theirs(run, registry: Registry) -> dict[str, torch.Tensor]:
    _, plan = compose_model(run)
    return {
        find_hf_tensors(plan, name.removeprefix("model/"), layout.shape)[0].name: drawn(name, layout)
        for name, layout in registry.layouts.items()
        if name.startswith("model/")
    }


def test_export_selects_callback_weights_by_prefix(run, trained, tmp_path):
    """Check that a frozen weight, which has no average, is exported from the model itself.

    A missing average of a trained weight is an error.
    """
    _, registry = trained
    frozen, prefix = "blocks.0.attention.wq.weight", "callback/ema/0.9"
    layouts = {name: layout for name, layout in registry.layouts.items() if name != f"optimizer/exp_avg/{frozen}"}
    names = [name.removeprefix("model/") for name in layouts if name.startswith("model/")]
    averages = {f"{prefix}/{name}": layouts[f"model/{name}"] for name in names if name != frozen}
    place = str(tmp_path / "averaged" / "step-00000007")
    save(place, Registry.of(registry.mesh, layouts | averages), drawn, {"step": 7, "config": to_dict(run)})
    main(["ckpt", "export", place, str(tmp_path / "hf"), "--weights", prefix])
    found = load_file(tmp_path / "hf" / "model.safetensors")
    _, plan = compose_model(run)
    for name in names:
        hf_name = find_hf_tensors(plan, name, layouts[f"model/{name}"].shape)[0].name
        array = f"model/{name}" if name == frozen else f"{prefix}/{name}"
        assert torch.equal(found[hf_name], drawn(array, layouts[f"model/{name}"])), name

    partial = {name: layout for name, layout in averages.items() if not name.endswith("wk.weight")}
    save(place + "0", Registry.of(registry.mesh, layouts | partial), drawn, {"step": 7, "config": to_dict(run)})
    assert main(["ckpt", "export", place + "0", str(tmp_path / "part"), "--weights", prefix]) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_export_writes_hugging_face_names_and_dtype(run, trained, tmp_path, dtype, capsys):
    place, registry = trained
    out = tmp_path / "hf"
    assert main(["ckpt", "export", place, str(out), "--dtype", dtype]) == 0
    assert f"{out}: model of {place}, " in capsys.readouterr().out
    found, wanted = load_file(out / "model.safetensors"), theirs(run, registry)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name].to(getattr(torch, dtype))), name
    config = json.loads((out / "config.json").read_text())
    assert config == make_config_json(run.model, dtype=dtype, max_position=32)


def test_large_export_is_split_into_indexed_files(run, trained, tmp_path):
    place, registry = trained
    assert main(["ckpt", "export", place, str(tmp_path / "hf"), "--shard-gb", "1e-5"]) == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = theirs(run, registry)
    assert index.keys() == wanted.keys()
    assert len(set(index.values())) > 2
    for name, file in index.items():
        assert torch.equal(load_file(tmp_path / "hf" / file)[name], wanted[name])


def test_export_and_import_round_trip_is_exact(run, trained, tmp_path, capsys):
    place, registry = trained
    main(["ckpt", "export", place, str(tmp_path / "hf")])
    capsys.readouterr()
    assert main(["ckpt", "import", str(tmp_path / "hf"), str(tmp_path / "new")]) == 0
    command = capsys.readouterr().out.replace(" \\\n ", "").split()
    made = tmp_path / "new" / "checkpoints" / "step-00000000"
    assert main(["ckpt", "verify", str(made)]) == 0
    document = find_place([str(made)]).copy().meta.document
    assert (document["step"], document["cursor"], document["tokens"]) == (0, 0, 0)
    # Only the optimizer state is missing; all other arrays are equal.
    assert main(["ckpt", "diff", place, str(made)]) == 1
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith(("model/", "optimizer/"))]
    assert len(rows) == len(registry.layouts) // 2
    assert all(line.startswith("optimizer/") and line.endswith("only in a") for line in rows)
    assert main(["ckpt", "export", str(made), str(tmp_path / "again")]) == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    # The printed command must start a run of the same model.
    assert command[0] == "train"
    assert command[-1] == f"run.dir={tmp_path / 'new'}"
    printed, model = compose_one(command[1:]), run.model
    assert (printed.model.dim, printed.model.qk_norm, printed.model.weights) == (model.dim, model.qk_norm, None)


def test_bfloat16_weights_are_widened_exactly(run, trained, tmp_path):
    place, registry = trained
    main(["ckpt", "export", place, str(tmp_path / "hf"), "--dtype", "bfloat16"])
    main(["ckpt", "import", str(tmp_path / "hf"), str(tmp_path / "new")])
    main(["ckpt", "export", str(tmp_path / "new" / "checkpoints"), str(tmp_path / "again")])
    wanted = theirs(run, registry)
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, wanted[name].bfloat16().float())


def test_training_starts_from_imported_and_averaged_weights(trained, tmp_path, capsys):
    """Train with the overrides that `ckpt import` prints; losses must equal a run on the Hugging Face weights.

    The run starts from the average of the imported checkpoint with itself, which tests `average` too.
    """
    place, _ = trained
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(48, 60)) * 400)
    main(["ckpt", "export", place, str(tmp_path / "hf")])
    capsys.readouterr()
    main(["ckpt", "import", str(tmp_path / "hf"), str(tmp_path / "new")])
    words = capsys.readouterr().out.replace(" \\\n ", "").split()[1:]
    made = str(tmp_path / "new" / "checkpoints" / "step-00000000")
    assert main(["ckpt", "average", made, made, "-o", str(tmp_path / "mean")]) == 0
    rest = [
        *("run.steps=2", "batch.global_size=4", "batch.sequence_length=16", "run.sample=0", "validate.every=null"),
        *(f"data.path={text}", "parallel=single", "track=[jsonl]", "run.deterministic=true"),
    ]
    losses = []
    for start in (
        [*words[:-1], f"run.dir={tmp_path / 'mean'}"],
        [*words[:-1], f"run.dir={tmp_path / 'other'}", f"model.weights={tmp_path / 'hf'}"],
    ):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*warm.make_command("gangline.cli.train", environment), *start, *rest]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        directory = next(word for word in start if word.startswith("run.dir=")).removeprefix("run.dir=")
        lines = Path(directory, "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def test_export_and_import_refuse_invalid_arguments(trained, tmp_path, capsys):
    place, _ = trained
    save(str(tmp_path / "bare"), Registry.of(Mesh.of({}), {"model/w": Layout((2,))}))
    for words, said in (
        (["export", str(tmp_path / "bare"), str(tmp_path / "x")], "bare is unknown"),
        (["export", place, str(tmp_path)], "exists"),
        (["import", str(tmp_path / "bare"), str(tmp_path / "x")], "is not a Hugging Face model directory"),
    ):
        assert main(["ckpt", *words]) == 2
        assert said in capsys.readouterr().err
    main(["ckpt", "export", place, str(tmp_path / "hf")])
    main(["ckpt", "import", str(tmp_path / "hf"), str(tmp_path / "new")])
    assert main(["ckpt", "import", str(tmp_path / "hf"), str(tmp_path / "new")]) == 2
    assert "already contains a checkpoint" in capsys.readouterr().err


def test_failed_import_leaves_no_files(trained, tmp_path, capsys):
    place, _ = trained
    main(["ckpt", "export", place, str(tmp_path / "hf")])
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors.popitem()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    assert main(["ckpt", "import", str(tmp_path / "hf"), str(tmp_path / "new")]) == 2
    assert f"is missing in {tmp_path / 'hf'}." in capsys.readouterr().err
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]


WATCHED = """
import gc, os, sys, threading, time
import torch, safetensors.torch, numpy, crc32c
import gangline.train.restore, gangline.config.compose, gangline_models.hugging_face.write
from gangline.cli.main import main

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def run(words):
    torch.ones(1000, 1000).to(torch.bfloat16).sum()  # what torch takes once
    before, peak, over = anonymous(), 0, False

    def watch():
        nonlocal peak
        while not over:
            peak = max(peak, anonymous())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = main(["ckpt", *words])
    over = True
    watcher.join()
    assert code == 0
    print("peak", peak - before, flush=True)

gc.freeze()
for words in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        run(words.splitlines())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def peaks(*verbs: tuple[object, ...]) -> list[int]:
    """Return the peak memory of each command in bytes beyond its imports, without pages of mapped files.

    The commands run one after another, each in a process forked from one that has only imported the modules.
    """
    words = ["\n".join(map(str, verb)) for verb in verbs]
    done = subprocess.run([sys.executable, "-c", WATCHED, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(line.removeprefix("peak ")) for line in done.stdout.splitlines() if line.startswith("peak ")]


def test_conversion_memory_is_below_two_largest_arrays(tmp_path):
    """Convert a model of 244 MiB, of which five arrays have 48 MiB each."""
    settings = (
        *("model=decoder", "model.vocab_size=24576", "model.dim=512", "model.layers=1", "model.heads=4"),
        *("model.ffn_dim=24576", "model.tied=false"),
    )
    run = compose_one([*settings, "checkpoint=zarr"])
    tree, _ = compose_model(run)
    layouts = {f"model/{name}": Layout(shape) for name, shape in get_parameter_shapes(tree).items()}
    largest, total = (pick(layout.nbytes for layout in layouts.values()) for pick in (max, sum))
    assert largest == 48 << 20
    assert total > 4 * largest
    values = torch.randn(largest // 4)
    save(
        str(tmp_path / "a"),
        Registry.of(Mesh.of({}), layouts),
        lambda name, layout: values[: layout.nbytes // 4].view(layout.shape),
        {"config": to_dict(run)},
    )
    held = peaks(
        ("export", tmp_path / "a", tmp_path / "hf"),
        ("export", tmp_path / "a", tmp_path / "half", "--dtype", "bfloat16"),
        ("import", tmp_path / "hf", tmp_path / "b"),
    )
    assert len(held) == 3
    assert 0 < min(held) <= max(held) < 2 * largest, held
