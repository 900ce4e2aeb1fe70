"""Gradients changed by a callback before clipping, in complete runs on sharded layouts."""

from __future__ import annotations

import pytest

from gangline.callback import Callback
from gangline.train.rank import train
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session, read_lines


class TenTimes(Callback):
    """Callback that multiplies every gradient by ten."""

    def before_clip(self, parameters):
        for parameter in parameters:
            for piece in parameter.pieces:
                piece.tensor.grad *= 10


def changed(run_dir, *settings):
    s = open_session(run_dir, "run.steps=3", "optimizer.clip_norm=0.001", "checkpoint=off", *settings)
    s.callbacks["ten-times"] = TenTimes()
    train(s)


def curve(run_dir):
    return [(line["loss"], line["grad_norm"]) for line in read_lines(run_dir, "metrics.jsonl")]


@pytest.mark.parametrize("layout", ["parallel=fsdp", "parallel=pp"])
def test_gradients_changed_before_clipping_match_one_process(layout, tmp_path):
    """Check that ranks compute the norm again from the changed gradients of all ranks."""
    changed(tmp_path / "one")
    get_pool(2).run(changed, tmp_path / "two", layout)
    for found, want in zip(curve(tmp_path / "two"), curve(tmp_path / "one"), strict=True):
        assert found == pytest.approx(want, rel=1e-12)
