"""Blocks under torch.compile on the fake device: how many graphs they become."""

from __future__ import annotations

import pytest
from compiled import run_compiled
from layouts import CUDA, Layout, run_layout

BF16 = "precision=bf16"


@pytest.mark.parametrize("layers", [2, 12])
def test_a_dense_block_is_one_graph_for_all_layers(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    stepped, graphs = run_compiled(Layout("dense"), monkeypatch, BF16, f"model.layers={layers}")
    plain = run_layout(Layout("dense"), CUDA, BF16, f"model.layers={layers}", watched=False)
    assert len(graphs.operators) == 1
    assert not graphs.breaks
    assert stepped.losses == pytest.approx(plain.losses, rel=0.01)
