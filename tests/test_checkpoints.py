"""Layout invariance across a checkpoint: a run resumed on another layout equals that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gangline.config.compose import compose_one
from gangline.config.schema import Run
from gangline.mesh import Mesh
from gangline.plugin import registry
from gangline.record import read_records
from gangline.run.directory import RunDirectory
from gangline.shard import Layout, Registry, Shard, name_dtype
from gangline.train.build import build
from gangline.train.rank import train
from gangline.train.session import Session
from gangline_testkit import rank
from gangline_testkit.pool import get_pool
from gangline_testkit.real_runs import write_small_text

BOUND = 1e-9  # relative, in float64; measured: 1e-13 at most
SETTINGS = (
    "model=tiny",
    "model.dim=32",
    "model.heads=4",
    "model.ffn_dim=64",
    "model.layers=4",
    "batch.global_size=12",
    "batch.sequence_length=16",
    "schedule=constant",
    "precision=fp64",
    "validate.every=null",
    "run.sample=0",
    "track=[jsonl]",
    "track.jsonl.figure=false",
    "checkpoint=zarr",
)
ONE = ("parallel=single",)
THREE = ("parallel=fsdp", "launch.processes=3")  # no dimension of an array is divisible by 3
SHARDED = ("parallel=3d", "parallel.dp_shard=2", "parallel.zero=3", "parallel.tp=1", "parallel.pp=1")
PIPED = ("parallel=3d", "parallel.pp=2", "parallel.tp=2", "parallel.dp_shard=1")
CUBE = ("parallel=3d", "parallel.pp=2", "parallel.tp=2", "parallel.dp_shard=2", "parallel.zero=1")
RING = (
    "parallel=3d",
    "parallel.cp=2",
    "parallel.dp_replicate=2",
    "parallel.tp=2",
    "parallel.pp=1",
    "parallel.dp_shard=1",
)
WORLDS = {ONE: 1, THREE: 3, SHARDED: 2, PIPED: 4, CUBE: 8, RING: 8}
PAIRS = {
    "one process to pp 2, tp 2, dp 2": (ONE, CUBE),
    "pp 2, tp 2, dp 2 to one process": (CUBE, ONE),
    "cp 2, replicas 2, tp 2 to three": (RING, THREE),
    "three to pp 2, tp 2": (THREE, PIPED),
    "pp 2, tp 2 to cp 2, replicas 2, tp 2": (PIPED, RING),
    "zero 3 to pp 2, tp 2, dp 2": (SHARDED, CUBE),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("layout")
    write_small_text(found / "corpus")
    return found


def words(run_dir: Path, layout: tuple[str, ...], steps: int) -> list[str]:
    return [*SETTINGS, *layout, f"data.path={run_dir.parent}/corpus", f"run.dir={run_dir}", f"run.steps={steps}"]


def trained(run_dir: Path, layout: tuple[str, ...], steps: int) -> list[list[str]]:
    """Start or resume a run on a layout; return for each rank the arrays that differ from the checkpoint."""
    run = compose_one(words(run_dir, layout, steps))
    if not run_dir.exists():
        RunDirectory.create(run).unlock()
    return get_pool(WORLDS[layout]).run(on_a_rank, run, timeout=600.0)


def on_a_rank(run: Run) -> list[str]:
    mesh = Mesh.of(run.parallel.size_axes(rank.world))
    session = build(run, RunDirectory.open(str(run.job.dir)), mesh, rank.make_comms(mesh), torch.device("cpu"))
    other = differing(session) if session.step else []
    train(session)
    return other


def differing(session: Session) -> list[str]:
    """Return the arrays of this rank that are not bit-identical to the latest checkpoint, read as full arrays."""
    reader = registry.build(session.run.checkpoint, session.run, None)
    id = reader.find_latest()
    wholes = {
        shard.name: Shard(
            shard.name,
            shard.global_shape,
            shard.dtype,
            (0,) * len(shard.global_shape),
            torch.empty(shard.global_shape, dtype=shard.dtype),
            True,
        )
        for shard in session.shards()
    }
    layouts = {name: Layout(whole.global_shape, name_dtype(whole.dtype)) for name, whole in wholes.items()}
    reader.load(id, wholes.values(), Registry.of(Mesh.of({}), layouts))
    reader.close()
    assert len(wholes) > 10
    return [
        shard.name
        for shard in session.shards()
        if not torch.equal(shard.local.detach(), wholes[shard.name].local[shard.box.slices])
    ]


def curve(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(found["step"], found["loss"], found["grad_norm"]) for found in read_records(run_dir / "metrics.jsonl")]


def holds(place: Path, first: tuple[str, ...], second: tuple[str, ...], steps: int, more: int) -> None:
    alone = place / f"alone-{steps + more}"
    if not alone.exists():
        trained(alone, ONE, steps + more)
    run_dir = place / f"{list(WORLDS).index(first)}-{list(WORLDS).index(second)}-{steps}"
    trained(run_dir, first, steps)
    assert [path.parent.name for path in run_dir.glob("checkpoints/*/zarr.json")] == [f"step-{steps:08d}"]
    different = trained(run_dir, second, steps + more)
    assert different == [[]] * WORLDS[second]
    found, expected = curve(run_dir), curve(alone)
    assert [step for step, *_ in found] == list(range(1, steps + more + 1))
    for got, want in zip(found, expected, strict=True):
        assert got == pytest.approx(want, rel=BOUND)


@pytest.mark.parametrize("pair", ["one process to pp 2, tp 2, dp 2", "cp 2, replicas 2, tp 2 to three"])
def test_checkpoint_resumes_under_another_layout(place: Path, pair: str) -> None:
    holds(place, *PAIRS[pair], steps=2, more=2)


@pytest.mark.nightly
@pytest.mark.parametrize("pair", PAIRS)
def test_twenty_step_checkpoint_resumes_under_another_layout(place: Path, pair: str) -> None:
    holds(place, *PAIRS[pair], steps=20, more=8)
