"""mup=on: nothing at the base width; at others activations and updates of one size, on any layout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gangline.config.check import check
from gangline.config.compose import compose
from gangline.errors import UserError
from gangline.model import compose_model, parameter_shapes
from gangline.testing.sessions import lines, session, trained, trained_on

BLOCKS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
BLOCKS += ("feed_forward.w_gate", "feed_forward.w_up", "feed_forward.w_down")


def words(dim: int, base: int = 32) -> tuple[str, ...]:
    """A model of that width, of more heads, with the rates that mup asks for."""
    rates = ", ".join(f"blocks.*.{name}: {base / dim}" for name in BLOCKS)
    return (
        "mup=on", f"mup.base_dim={base}", f"model.dim={dim}", f"model.heads={dim // 8}", f"model.kv_heads={dim // 8}",
        f"model.hidden={2 * dim}", f"optimizer.rates={{{rates}}}", "optimizer.weight_decay=0", "checkpoint=off",
    )  # fmt: skip


def test_at_the_base_width_it_changes_nothing(tmp_path: Path) -> None:
    mup = [word for word in words(32) if not word.startswith("optimizer.rates")]
    without = [word for word in mup if not word.startswith("mup")]
    assert trained(tmp_path / "on", *mup, "run.steps=3") == 0
    assert trained(tmp_path / "off", *without, "run.steps=3") == 0
    one, other = (lines(tmp_path / name, "metrics.jsonl") for name in ("on", "off"))
    assert [record["loss"] for record in one] == [record["loss"] for record in other]


def test_first_weights_scores_and_logits_of_a_wide_model() -> None:
    (run,) = compose(["recipe=tiny", *words(128)])
    tree, plan = compose_model(run)
    (narrow,) = compose(["recipe=tiny", *words(32)])
    _, base = compose_model(narrow)
    assert tree.head.scale == 1 / 4
    assert tree.blocks[0].attention.scale == 1 / math.sqrt(8)  # heads of one width: more of them
    for name, shape in parameter_shapes(tree).items():
        there, here = base.init(name), plan.init(name)
        factor = 0.5 if len(shape) >= 2 and name.startswith("blocks.") else 1.0
        assert here.scale == pytest.approx(there.scale * factor), name
    (run,) = compose(["recipe=tiny", *words(128), "mup.base_head_dim=2"])
    assert compose_model(run)[0].blocks[0].attention.scale == pytest.approx(2**-0.5 * 2 / 8)


def test_a_run_without_its_rates_is_told_them() -> None:
    mup = [word for word in words(128) if not word.startswith("optimizer.rates")]
    (run,) = compose(["recipe=tiny", *mup])
    with pytest.raises(UserError, match="needs other rates") as error:
        check(run)
    said = next(line for line in str(error.value).splitlines() if "optimizer.rates=" in line).strip().strip("'")
    (run,) = compose(["recipe=tiny", *mup, said])
    check(run)
    (run,) = compose(["recipe=tiny", *mup, "optimizer=muon"])
    with pytest.raises(UserError, match="optimizer=adamw"):
        check(run)


def test_it_obeys_the_law(tmp_path: Path) -> None:
    layout = ("parallel=ddp", "batch.micro_size=2")
    assert trained(tmp_path / "one", *words(64), "run.steps=4") == 0
    assert trained_on(2, tmp_path / "two", *words(64), *layout, "run.steps=4") == 0
    one, two = (lines(tmp_path / name, "metrics.jsonl") for name in ("one", "two"))
    for here, there in zip(one, two, strict=True):
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-12)


def change_of_logits(run_dir: Path, *chosen: str) -> float:
    """Root mean square of what ten steps changed of the logits of one batch."""
    s = session(run_dir, *chosen, "run.steps=10", "optimizer.learning_rate=0.01", "schedule.warmup_steps=0")
    (batch, *_) = s.batches.take(0, 0)
    with torch.no_grad():
        before = s.runtime.model.logits(batch)
    for step in range(10):
        s.runtime.step(s.batches.take(8 * step, step))
        s.optimizer.step(0.01)
        s.runtime.applied()
    with torch.no_grad():
        return float((s.runtime.model.logits(batch) - before).square().mean().sqrt())


def test_what_steps_change_of_the_logits_does_not_grow_with_the_width(tmp_path: Path) -> None:
    """The coordinate check of the paper (appendix D.1)."""
    mup = {dim: change_of_logits(tmp_path / f"mup{dim}", *words(dim)) for dim in (32, 256)}
    usual = {
        dim: change_of_logits(tmp_path / f"usual{dim}", *[word for word in words(dim) if "mup" not in word][:4])
        for dim in (32, 256)
    }
    assert 0.5 < mup[256] / mup[32] < 2, mup
    assert usual[256] / usual[32] > 1.5 * mup[256] / mup[32], (usual, mup)
