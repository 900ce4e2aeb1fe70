"""Experts in float8 are refused on a GPU."""

from __future__ import annotations

import pytest

from gangline.config.check import check
from gangline.errors import UserError
from gangline_moe import config
from gangline_testkit.runs import build_small_run


@pytest.mark.parametrize(("gpus", "device", "refused"), [(8, "null", True), (8, "cpu", False), (0, "null", False)])
def test_experts_in_float8_are_refused_on_a_gpu(monkeypatch, gpus, device, refused):
    """Count the GPUs of an imaginary machine; experts in float8 are computed one by one, for tests on a CPU alone."""
    monkeypatch.setattr(config, "count_gpus", lambda name: 0 if name == "cpu" else gpus)
    run = build_small_run("moe=on", "model.vocab_size=256", "precision=fp8", f"run.device={device}")
    if not refused:
        check(run)
        return
    with pytest.raises(UserError, match="moe=on does not support precision=fp8 on a GPU") as error:
        check(run)
    assert "precision=bf16, or moe=off" in str(error.value)
