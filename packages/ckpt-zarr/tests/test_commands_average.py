"""`gangline ckpt average`: mean in float64, same-model check, damaged inputs, existing outputs."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from made import cut, run_dir, save, small

from gangline.cli.main import main
from gangline.config.compose import compose_one
from gangline.config.serial import to_dict
from gangline.mesh import Mesh
from gangline.shard import Box, Division, Layout, Registry
from gangline_ckpt_zarr.commands.where import find_place
from gangline_ckpt_zarr.format.dtypes import map_dtype
from gangline_ckpt_zarr.load.read_plan import Target, plan_reads
from gangline_ckpt_zarr.load.reader import ChunkReader

ELSEWHERE = Registry.of(  # arrays of `small`, sharded differently
    Mesh.of({"tp": 3}),
    {
        name: replace(layout, divisions=(Division(("tp",), cut(layout.shape[0], 3)),) if layout.shape else (), turn=0)
        for name, layout in small().layouts.items()
    },
)


@pytest.fixture(scope="module")
def config():
    return to_dict(compose_one(["recipe=tiny", "checkpoint=zarr"]))


def drawn(salt: int):
    """Return a function that draws values whose sums are not exact in float32."""

    def values(name: str, layout: Layout) -> torch.Tensor:
        generator = torch.Generator().manual_seed(salt * 100 + len(name))
        found = torch.randn(layout.shape, dtype=torch.float64, generator=generator) * 10**salt
        return found.to(getattr(torch, layout.dtype))

    return values


@pytest.fixture
def three(tmp_path, config):
    """Return a run with checkpoints of three steps, each in another layout."""
    run = run_dir(tmp_path / "run")
    for step, registry in ((1, small()), (2, ELSEWHERE), (3, small(4))):
        place = run / "checkpoints" / f"step-{step:08d}"
        save(str(place), registry, drawn(step), {"config": config, "seed": 5})
    return run


def values(place, name: str) -> np.ndarray:
    meta = find_place([str(place)]).copy().meta
    layout = meta.registry[name]
    whole = np.empty(layout.shape, map_dtype(layout.dtype))
    for rank, items in plan_reads(meta, [Target(name, Box((0,) * len(layout.shape), layout.shape), whole)]).items():
        ChunkReader(meta, meta.get_file_path(rank), find_place([str(place)]).copy().store).read(items)
    return whole


STEPS = [f"step-{step:08d}" for step in (1, 2, 3)]


def test_average_is_computed_in_float64_and_rounded_once(three, tmp_path, capsys):
    out = tmp_path / "new" / "mean"
    assert main(["ckpt", "average", str(three), *STEPS, "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "mean of 3 checkpoints, 5 arrays" in said
    assert f"train from={three} run.dir={out}" in said
    made = out / "checkpoints" / "step-00000000"
    assert main(["ckpt", "verify", str(made)]) == 0
    meta = find_place([str(made)]).copy().meta
    names = [name for name in small() if name.startswith("model/")]
    assert list(meta.registry) == names, "weights alone"
    for name in names:
        layout = small()[name]
        total = sum(drawn(step)(name, layout).double() for step in (1, 2, 3)) / 3
        wanted = total.to(getattr(torch, layout.dtype)).to(getattr(torch, map_dtype(layout.dtype)))
        assert np.array_equal(values(made, name), wanted.numpy()), name
    document = meta.document
    assert (document["step"], document["attempt"], document["cursor"], document["states"]) == (0, 1, 0, {})


def test_average_of_equal_checkpoints_is_unchanged(three, tmp_path):
    assert main(["ckpt", "average", str(three), STEPS[0], STEPS[0], "-o", str(tmp_path / "mean")]) == 0
    assert (
        find_place([str(tmp_path / "mean")]).list_ids()
        == find_place([str(tmp_path / "mean" / "checkpoints")]).list_ids()
        != []
    )
    for name in ("model/columns", "model/half", "model/bias"):
        found = values(tmp_path / "mean" / "checkpoints" / "step-00000000", name)
        assert np.array_equal(found, values(three / "checkpoints" / STEPS[0], name))


def test_average_takes_integer_arrays_from_last_checkpoint(tmp_path, config, capsys):
    registry = Registry.of(Mesh.of({}), {"model/w": Layout((4,)), "model/seen": Layout((2,), "int64")})
    for step in (1, 2):
        save(str(tmp_path / f"step-0000000{step}"), registry, lambda name, layout, n=step: torch.full(
            layout.shape, n, dtype=getattr(torch, layout.dtype)), {"config": config, "seed": 0})  # fmt: skip
    places = [str(tmp_path / f"step-0000000{step}") for step in (1, 2)]
    assert main(["ckpt", "average", *places, "-o", str(tmp_path / "mean")]) == 0
    assert "model/seen: integer arrays have no mean; copied from " in capsys.readouterr().out
    assert values(tmp_path / "mean" / "checkpoints" / "step-00000000", "model/seen").tolist() == [2, 2]
    assert values(tmp_path / "mean" / "checkpoints" / "step-00000000", "model/w").tolist() == [1.5] * 4


def test_average_requires_and_records_same_base_model(tmp_path, config, capsys):
    for step, print_ in ((1, "aa"), (2, "aa"), (3, "bb")):
        said = {"config": config, "seed": 5, "model": "all", "base": {"fingerprint": print_, "arrays": 7, "from": "b"}}
        save(str(tmp_path / f"step-0000000{step}"), small(), drawn(step), said)
    first, second, other = (str(tmp_path / f"step-0000000{step}") for step in (1, 2, 3))
    assert main(["ckpt", "average", first, other, "-o", str(tmp_path / "no")]) == 2
    assert "were trained on different base weights" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main(["ckpt", "average", first, second, "-o", str(tmp_path / "mean")]) == 0
    document = find_place([str(tmp_path / "mean" / "checkpoints" / "step-00000000")]).copy().meta.document
    assert document["base"] == {"fingerprint": "aa", "arrays": 7, "from": "b"}
    assert document["model"] == "all"


def test_average_refuses_different_quantized_weights(tmp_path, config, capsys):
    """Check weights stored as int8 codes and scales: codes of one checkpoint do not fit the mean scales of several."""
    registry = Registry.of(Mesh.of({}), {"model/w.weight": Layout((4, 4), "int8"), "model/w.scales": Layout((4, 1))})
    for step, code in ((1, 3), (2, 3), (3, 4)):
        save(str(tmp_path / f"step-0000000{step}"), registry, lambda name, layout, code=code: torch.full(
            layout.shape, code if "weight" in name else 0.5, dtype=getattr(torch, layout.dtype)),
            {"config": config, "seed": 0})  # fmt: skip
    first, second, other = (str(tmp_path / f"step-0000000{step}") for step in (1, 2, 3))
    assert main(["ckpt", "average", first, other, "-o", str(tmp_path / "no")]) == 2
    said = capsys.readouterr().err
    assert "store different low-bit codes in model/w.weight" in said, said
    assert not (tmp_path / "no").exists()
    assert main(["ckpt", "average", first, second, "-o", str(tmp_path / "mean")]) == 0
    assert "no mean" not in capsys.readouterr().out
    assert values(tmp_path / "mean" / "checkpoints" / "step-00000000", "model/w.weight").tolist() == [[3] * 4] * 4


def test_average_refuses_incompatible_checkpoints_and_outputs(three, tmp_path, config, capsys):
    another = {**config, "model": {**config["model"], "rope_theta": 17.0}}
    wide = Registry.of(small().mesh, {**small().layouts, "model/bias": Layout((34,), "float64")})
    save(str(tmp_path / "wide"), wide, document={"config": config})
    save(str(tmp_path / "another"), small(), document={"config": another})
    save(str(tmp_path / "bare"), small())
    (tmp_path / "there").mkdir()
    two = [str(three), *STEPS[:2]]
    for words, said in (
        ([str(three), "-o", str(tmp_path / "x")], "needs at least two checkpoints, got 1"),
        (
            [*two, str(tmp_path / "wide"), "-o", str(tmp_path / "x")],
            "model/bias: (33,) float64 in the first, (34,) float64 in",
        ),
        ([*two, str(tmp_path / "another"), "-o", str(tmp_path / "x")], "rope_theta is "),
        ([str(tmp_path / "bare"), str(tmp_path / "bare"), "-o", str(tmp_path / "x")], "bare is unknown"),
        ([*two, "-o", str(tmp_path / "there")], "exists already"),
        ([*two, "-o", str(three / "mean")], "is inside the run directory"),
        ([*two, str(tmp_path / "nowhere"), "-o", str(tmp_path / "x")], "nowhere does not exist"),
    ):
        assert main(["ckpt", "average", *words]) == 2, words
        assert said in capsys.readouterr().err
        assert not (tmp_path / "x").exists()
        assert not (three / "mean").exists()


def test_average_of_damaged_checkpoint_leaves_no_output(three, tmp_path, capsys):
    for number, (name, at) in enumerate((("data-*/00001.bin", 40), ("zarr.json", 200))):
        (path,) = (three / "checkpoints" / STEPS[1]).glob(name)
        content = path.read_bytes()
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        out = tmp_path / f"mean{number}"
        assert main(["ckpt", "average", str(three), *STEPS, "-o", str(out)]) == 1
        assert "is damaged" in capsys.readouterr().out
        assert not out.exists()
        path.write_bytes(content)


def test_average_without_disk_space_leaves_no_output(three, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert main(["ckpt", "average", str(three), *STEPS, "-o", str(tmp_path / "new" / "mean")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "new").exists()


def test_average_records_run_config(three, tmp_path, config):
    main(["ckpt", "average", str(three), *STEPS, "-o", str(tmp_path / "mean")])
    content = json.loads((tmp_path / "mean" / "checkpoints" / "step-00000000" / "zarr.json").read_bytes())
    assert content["attributes"]["gangline"]["document"]["config"] == config
