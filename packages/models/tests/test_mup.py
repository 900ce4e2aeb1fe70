"""`mup=on`: no change at the base width; activations and updates independent of width, on any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gangline.batch import Batch
from gangline.config.check import check
from gangline.config.compose import compose
from gangline.errors import UserError
from gangline.model.compose import compose_model
from gangline.model.tree import get_parameter_shapes
from gangline_testkit.sessions import open_session, read_lines, train_on_ranks, train_session

BLOCKS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
BLOCKS += ("feed_forward.w_gate", "feed_forward.w_up", "feed_forward.w_down")


def words(dim: int, base: int = 32) -> tuple[str, ...]:
    """Return the settings of a model of this width, with more heads and with the learning rates that mup requires."""
    rates = ", ".join(f"blocks.*.{name}: {base / dim}" for name in BLOCKS)
    return (
        "mup=on", f"mup.base_dim={base}", f"model.dim={dim}", f"model.heads={dim // 8}", f"model.kv_heads={dim // 8}",
        f"model.ffn_dim={2 * dim}", f"optimizer.lr_multipliers={{{rates}}}", "optimizer.weight_decay=0",
        "checkpoint=off",
    )  # fmt: skip


def test_mup_at_base_width_keeps_losses(tmp_path: Path) -> None:
    mup = [word for word in words(32) if not word.startswith("optimizer.lr_multipliers")]
    without = [word for word in mup if not word.startswith("mup")]
    assert train_session(tmp_path / "on", *mup, "run.steps=3") == 0
    assert train_session(tmp_path / "off", *without, "run.steps=3") == 0
    one, other = (read_lines(tmp_path / name, "metrics.jsonl") for name in ("on", "off"))
    assert [record["loss"] for record in one] == [record["loss"] for record in other]


def test_mup_scales_init_attention_and_logits_with_width() -> None:
    (run,) = compose(["recipe=tiny", *words(128)])
    tree, plan = compose_model(run)
    (narrow,) = compose(["recipe=tiny", *words(32)])
    _, base = compose_model(narrow)
    assert tree.head.scale == 1 / 4
    assert tree.blocks[0].attention.scale == 1 / math.sqrt(8)  # heads keep their width, and there are more of them
    for name, shape in get_parameter_shapes(tree).items():
        there, here = base.init(name), plan.init(name)
        factor = 0.5 if len(shape) >= 2 and name.startswith("blocks.") else 1.0
        assert here.scale == pytest.approx(there.scale * factor), name
    (run,) = compose(["recipe=tiny", *words(128), "mup.base_head_dim=2"])
    assert compose_model(run)[0].blocks[0].attention.scale == pytest.approx(2**-0.5 * 2 / 8)


def test_mup_without_lr_multipliers_prints_required_values() -> None:
    mup = [word for word in words(128) if not word.startswith("optimizer.lr_multipliers")]
    (run,) = compose(["recipe=tiny", *mup])
    with pytest.raises(UserError, match="requires other learning rates") as error:
        check(run)
    said = (
        next(line for line in str(error.value).splitlines() if "optimizer.lr_multipliers=" in line).strip().strip("'")
    )
    (run,) = compose(["recipe=tiny", *mup, said])
    check(run)
    (run,) = compose(["recipe=tiny", *mup, "optimizer=muon"])
    with pytest.raises(UserError, match="optimizer=adamw"):
        check(run)


def test_mup_is_layout_invariant(tmp_path: Path) -> None:
    layout = ("parallel=ddp", "batch.micro_size=2")
    assert train_session(tmp_path / "one", *words(64), "run.steps=4") == 0
    assert train_on_ranks(2, tmp_path / "two", *words(64), *layout, "run.steps=4") == 0
    one, two = (read_lines(tmp_path / name, "metrics.jsonl") for name in ("one", "two"))
    for here, there in zip(one, two, strict=True):
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-12)


def changes(run_dir: Path, *chosen: str) -> dict[str, float]:
    """Train five steps; return module -> root mean square of the change of its output for one batch, with "logits"."""
    s = open_session(run_dir, *chosen, "precision=fp32", "schedule.warmup_steps=0", "batch.micro_size=8")
    model, (batch, *_) = s.runtime.model, s.batches.take(0, 0)
    before = outputs(model, batch)
    for step in range(5):
        s.runtime.step(s.batches.take(8 * step, step))
        s.optimizer.step(2**-7)
        s.runtime.finish_update()
    after = outputs(model, batch)
    return {name: float((after[name] - out).square().mean().sqrt()) for name, out in before.items()}


def outputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the output of each module for a batch by path, and the logits."""
    found: dict[str, Tensor] = {}

    def keep(path: str, out: object) -> None:
        if isinstance(out, Tensor):
            found[path] = out.detach().clone()

    hooks = [
        module.register_forward_hook(lambda _, __, out, path=path: keep(path, out))
        for path, module in model.named_modules()
        if path
    ]
    with torch.no_grad():
        keep("logits", model.compute_logits(batch))
    for hook in hooks:
        hook.remove()
    return found


def grows(by_width: dict[int, list[dict[str, float]]], module: str) -> float:
    """Return the exponent with which changes of a module's output grow with the width.

    It is the slope of a line through the means over runs, because the change in one run may be two or three times the
    change in another.
    """
    x = [math.log(width) for width in by_width]
    y = [sum(math.log(changed[module]) for changed in runs) / len(runs) for runs in by_width.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


@pytest.mark.parametrize("widths", [(64, 256), pytest.param((64, 128, 256, 512), marks=pytest.mark.nightly)])
def test_mup_activation_updates_are_independent_of_width(tmp_path: Path, widths: tuple[int, ...]) -> None:
    """Run the coordinate check of the paper (appendix D.1) on the output of every module and on the logits."""

    def of_each_width(name: str, words_of: Callable[[int], Iterable[str]]) -> dict[int, list[dict[str, float]]]:
        return {
            dim: [changes(tmp_path / f"{name}{dim}-{seed}", *words_of(dim), f"run.seed={seed}") for seed in range(5)]
            for dim in widths
        }

    mup = of_each_width("mup", lambda dim: words(dim, widths[0]))
    usual = of_each_width("usual", lambda dim: [w for w in words(dim) if "mup" not in w and "lr_multipliers" not in w])
    slopes = {module: (grows(mup, module), grows(usual, module)) for module in mup[widths[0]][0]}
    assert len(slopes) > 20
    assert all(abs(ours) < 0.3 for ours, _ in slopes.values()), slopes
    for module in ("attention.wq", "attention.wv", "attention.wo", "feed_forward.w_up", "feed_forward.w_down"):
        for block in (0, 1):
            assert slopes[f"blocks.{block}.{module}"][1] > 0.45, (module, slopes)
    assert slopes["logits"][1] > abs(slopes["logits"][0]) + 0.25, slopes["logits"]
