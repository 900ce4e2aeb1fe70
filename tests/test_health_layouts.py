"""`health=monitors` on the layouts of other packages: weight checksums and recomputed steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.record import read_records
from gangline.run import attempts
from gangline_testkit.health_ranks import run_training
from gangline_testkit.pool import get_pool


def test_ranks_without_replicas_get_notice(tmp_path: Path) -> None:
    settings = ("health=[monitors]", "parallel=fsdp", "run.steps=2")
    (notes, _), _ = get_pool(2).run(run_training, tmp_path / "out", *settings)
    (told,) = [note for note in notes if "not-compared" in note]
    assert "compares the weights of 0 of 2 ranks" in told


FEW = "batch.global_size=4"
LAYOUTS = {
    "fsdp": (2, "parallel=fsdp", FEW),
    "stages": (2, "parallel=3d", "parallel.pp=2", FEW),
    "stages of tied weights": (2, "parallel=3d", "parallel.pp=2", "model.tied=true", FEW),
    "tensors": (2, "parallel=3d", "parallel.tp=2", FEW),
    "experts": (2, "parallel=fsdp", "moe=on", "moe.experts=4", "moe.every=1", FEW),
}
# Pipeline stages run with tied weights; those without tied weights run only at night.
NAMES = [pytest.param(name, marks=pytest.mark.nightly if name == "stages" else ()) for name in LAYOUTS]


@pytest.mark.parametrize("name", NAMES)
def test_weight_checksums_are_layout_invariant(tmp_path: Path, name: str) -> None:
    """Save on several ranks and resume on one; the checksums report no corruption."""
    world, *layout = LAYOUTS[name]
    model = [word for word in layout if not word.startswith("parallel")]
    out = tmp_path / "out"
    get_pool(world).run(run_training, out, "health=[monitors]", "checkpoint.every=2", "run.steps=2", *layout)
    notes, _ = run_training(out, "health=[monitors]", "checkpoint.every=2", "run.steps=4", "parallel=single", *model)
    assert not [note for note in notes if "corruption at" in note]
    assert [record["step"] for record in read_records(out / "metrics.jsonl")] == [1, 2, 3, 4]
    assert not [line for line in attempts.read(out) if line.action]


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_step_is_bit_identical_on_every_layout(tmp_path: Path, name: str) -> None:
    """Compute each step twice: both results are bit-identical, and the loss curve is unchanged."""
    world, *layout = LAYOUTS[name]
    words = ("health=[monitors]", "run.steps=3", *layout)
    get_pool(world).run(run_training, tmp_path / "once", *words)
    every = "health.monitors.corruption.recompute_every=1"
    (notes, _), *_ = get_pool(world).run(run_training, tmp_path / "twice", *words, every)
    assert "one step computed twice every 1 steps" in (tmp_path / "twice" / "events.jsonl").read_text()
    assert not [note for note in notes if "corruption at" in note]
    curves = [
        [(r["loss"], r["grad_norm"]) for r in read_records(tmp_path / way / "metrics.jsonl")]
        for way in ("once", "twice")
    ]
    assert curves[0] == curves[1]


def test_error_feedback_disables_step_recomputation(tmp_path: Path) -> None:
    """Check one-bit gradients: computing a step again would add the error that the first computation left."""
    words = ("health=[monitors]", "run.steps=4", "parallel=3d", "parallel.dp_replicate=2")
    words += ("gradients=onebit", "gradients.start_step=1")
    get_pool(2).run(run_training, tmp_path / "once", *words)
    every = "health.monitors.corruption.recompute_every=1"
    (notes, _), _ = get_pool(2).run(run_training, tmp_path / "asked", *words, every)
    assert any(
        "compressed gradients depend on the step before, so steps are not computed twice" in note for note in notes
    )
    assert not [note for note in notes if "corruption at" in note]
    once, asked = ([r["loss"] for r in read_records(tmp_path / way / "metrics.jsonl")] for way in ("once", "asked"))
    assert once == asked
    assert len(once) == 4
