"""Optimizers with state of a special shape: the run of one process on any layout, and after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gangline.config.resume import continue_run
from gangline.config.serial import to_dict
from gangline.mesh import Mesh
from gangline.run.directory import RunDirectory
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session, read_lines, train_on_ranks, train_session

OPTIMIZERS = {
    "adamw8bit": ("optimizer=adamw8bit", "optimizer.block=4", "optimizer.min_8bit_size=1"),
    "soap": ("optimizer=soap", "optimizer.precondition_frequency=2"),
}
LAYOUTS = {
    "ddp": (2, "parallel=ddp"),
    "zero 3": (2, "parallel=fsdp", "parallel.zero=3"),
    "zero 0": (2, "parallel=fsdp", "parallel.zero=0"),
    "zero 1, replicated": (4, "parallel=hsdp", "parallel.zero=1", "parallel.dp_shard=2", "parallel.dp_replicate=2"),
    "tp": (2, "parallel=tp"),
    "pp": (2, "parallel=pp"),
    "tp and pp": (4, "parallel=3d", "parallel.tp=2", "parallel.pp=2", "parallel.dp_shard=1"),
}
WORDS = ("run.steps=6", "batch.global_size=8")


def layouts(*by_day: str) -> list:
    """Return test parameters for all layouts; layouts not in `by_day` are nightly."""
    return [pytest.param(layout, marks=() if layout in by_day else pytest.mark.nightly) for layout in LAYOUTS]


@pytest.fixture(scope="module", params=OPTIMIZERS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, ...], Path]:
    """Train with an optimizer in one process and return (overrides, run directory)."""
    words, run_dir = (*OPTIMIZERS[request.param], *WORDS), tmp_path_factory.mktemp("alone") / "one"
    assert train_session(run_dir, *words) == 0
    return words, run_dir


def same(one: Path, other: Path, rel: float) -> None:
    for here, there in zip(read_lines(one, "metrics.jsonl"), read_lines(other, "metrics.jsonl"), strict=True):
        assert there["step"] == here["step"]
        assert there["loss"] == pytest.approx(here["loss"], rel=rel), here["step"]
        assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=10 * rel), here["step"]


@pytest.mark.parametrize("layout", layouts("zero 3"))  # the next test saves on tp and pp
def test_sharded_run_matches_one_process(tmp_path: Path, alone: tuple[tuple[str, ...], Path], layout: str) -> None:
    chosen, one = alone
    world, *words = LAYOUTS[layout]
    assert train_on_ranks(world, tmp_path / "cut", *chosen, *words) == 0
    same(one, tmp_path / "cut", 1e-12)


def test_run_resumes_in_another_layout(tmp_path: Path, alone: tuple[tuple[str, ...], Path]) -> None:
    """Save after 4 steps on 4 ranks, resume on 2 ranks and on one, and compare with the uninterrupted run."""
    chosen, one = alone
    world, *words = LAYOUTS["tp and pp"]
    assert train_on_ranks(world, tmp_path / "first", *chosen, *words, "run.steps=4") == 0
    for name in ("zero 3", "single"):
        shutil.copytree(tmp_path / "first", tmp_path / name)
        world, *words = LAYOUTS.get(name, (1,))
        assert train_on_ranks(world, tmp_path / name, *chosen, *words, "run.steps=6") == 0
        same(one, tmp_path / name, 1e-12)


def held(path: Path, *words: str) -> tuple[int, int]:
    """Return (bytes of optimizer state on this rank, bytes that `explain` reports for its stage's largest rank)."""
    started = open_session(path, *words)
    run = started.run
    said = run.parallel.explain(run, Mesh.of(dict(started.mesh.sizes)))
    assert said is not None
    stage = said.ranks[started.mesh.coordinate(started.comms.rank)["pp"]]
    return sum(s.local.numel() * s.local.itemsize for s in started.optimizer.shards()), stage.bytes["optimizer state"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", layouts("zero 3", "tp and pp"))
def test_explain_matches_optimizer_state_bytes(tmp_path: Path, layout: str, optimizer: str) -> None:
    """Compare the rank with the most state of a stage; `explain` counts rows that do not divide as equal shares."""
    world, *words = LAYOUTS[layout]
    ranks = get_pool(world).run(held, tmp_path / "run", *OPTIMIZERS[optimizer], *words)
    by_stage: dict[int, int] = {}
    for bytes_held, said in ranks:
        by_stage[said] = max(by_stage.get(said, 0), bytes_held)
    for said, most in by_stage.items():
        assert most == pytest.approx(said, rel=0.02), layout
        if "zero" not in layout or layout == "zero 0":
            assert most == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("parallel=tp launch.processes=2 model.ffn_dim=96", "optimizer.block=16; or parallel.tp=1"),
        ("parallel=fsdp launch.processes=2 model.ffn_dim=96", ""),
    ],
)
def test_layout_that_splits_optimizer_block_is_refused(words: str, said: str) -> None:
    from gangline.config.check import find_problems
    from gangline_testkit.runs import build_small_run

    run = build_small_run(
        "optimizer=adamw8bit", "optimizer.min_8bit_size=1", "optimizer.block=64", "model.dim=64", *words.split()
    )
    found = [problem for problem in find_problems(run) if "splits blocks of" in problem.what]
    assert len(found) == bool(said)
    for problem in found:
        assert said in problem.fix


def test_resume_accepts_a_smaller_optimizer_block(tmp_path: Path) -> None:
    """Save blocks of 16 in one process and resume with tp=2, which splits at 20, in blocks of 4; losses stay close."""
    chosen = ("optimizer=adamw8bit", "optimizer.min_8bit_size=1", "batch.global_size=8")
    words = ("parallel=tp", "launch.processes=2", "run.steps=6", "optimizer.block=4")
    assert train_session(tmp_path / "one", *chosen, "optimizer.block=16", "run.steps=6") == 0
    assert train_session(tmp_path / "cut", *chosen, "optimizer.block=16", "run.steps=4") == 0
    kept = to_dict(RunDirectory.open(str(tmp_path / "cut")).run())
    assert continue_run(str(tmp_path / "cut"), kept, words)[1]["optimizer.block"] == [16, 4]
    assert train_on_ranks(2, tmp_path / "cut", *chosen, *words) == 0
    one, cut = (read_lines(tmp_path / name, "metrics.jsonl") for name in ("one", "cut"))
    for here, there in zip(one, cut, strict=True):
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-12 if here["step"] < 6 else 1e-3)
