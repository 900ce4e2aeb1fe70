"""`gradients=powersgd`, the example of the documentation, on several layouts: exact resume, equal replicas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gangline_testkit.gradients_ranks import run_training
from gangline_testkit.install import as_installed
from gangline_testkit.pool import get_pool

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "gradient-reductions.md"
HALF = 3
LAYOUTS = (
    "dp_shard=2 dp_replicate=2 zero=0",
    "dp_shard=2 dp_replicate=2 zero=1 moe=on moe.ep=2",
)
MORE = (
    "dp_shard=2 dp_replicate=2 zero=3",
    "dp_shard=4 zero=2",
    "dp_shard=2 pp=2",
    "dp_replicate=2 tp=2",
    "dp_shard=2 cp=2 zero=3",
    "dp_shard=4 zero=3 moe=on moe.ep=2",
)


def powersgd(folder: Path) -> Path:
    """Write the plugin of the documentation page into a folder; return the folder."""
    flags = re.MULTILINE | re.DOTALL
    found = re.search(r"^```python\n(# \S+/gangline_powersgd\.py.*?)^```$", PAGE.read_text(), flags)
    assert found is not None
    (folder / "gangline_powersgd.py").write_text(found[1])
    return folder


def _setting(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return (name if name.startswith("moe") else f"parallel.{name}"), value


def lived_with(folder: Path, run_dir: Path, *settings: str):
    with as_installed("gangline-powersgd", "gangline_powersgd", path=folder):
        return run_training(run_dir, *settings)


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.nightly) for each in MORE)])
def test_powersgd_resumes_to_the_bit(layout: str, tmp_path: Path) -> None:
    folder = powersgd(tmp_path)
    axes = dict.fromkeys(("tp", "pp", "cp", "dp_shard", "dp_replicate"), "1")
    settings = {**{f"parallel.{axis}": size for axis, size in axes.items()}, **dict(map(_setting, layout.split()))}
    words = ("parallel=3d", *(f"{name}={value}" for name, value in settings.items()), "gradients=powersgd")
    words += ("gradients.rank=2", "gradients.start_step=1", "batch.global_size=8", "checkpoint.every=null")

    def run(name: str, steps: int):
        return get_pool(4).run(lived_with, folder, tmp_path / name, *words, f"run.steps={steps}")

    straight = run("straight", 2 * HALF)
    run("resumed", HALF)
    resumed = run("resumed", 2 * HALF)
    held: dict[tuple[str, tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}
    for (records, weights, names), (again, others, _) in zip(straight, resumed, strict=True):
        assert names, "it keeps nothing"
        assert [r.loss for r in records][HALF:] == [r.loss for r in again]
        for (name, offset, one), (_, _, other) in zip(weights, others, strict=True):
            assert torch.equal(one, other), name
            assert torch.equal(held.setdefault((name, offset, tuple(one.shape)), one), one), f"{name} differs"
    assert straight[0][0][-1].loss < straight[0][0][0].loss
