"""Blocks under torch.compile on the fake device: how many graphs they become."""

from __future__ import annotations

import pytest
from compiled import run_compiled
from layouts import CUDA, Layout, run_layout

BF16 = "precision=bf16"
MOE = ("moe=on", "moe.experts=4", "moe.top_k=2")
GRID = ("parallel=3d", "parallel.pp=1")
# Layout -> (graphs of its blocks, breaks of graphs), for any number of layers.
SHARED = {
    Layout("experts", MOE): (4, 3),
    Layout("experts on 2 ranks", (*MOE, "parallel=fsdp", "moe.ep=2"), 2): (6, 6),
    Layout("tensor 2", (*GRID, "parallel.tp=2"), 2): (7, 10),
    Layout("ring of 2", (*GRID, "parallel.tp=1", "parallel.cp=2"), 2): (6, 3),
    Layout("zero bubble", ("parallel=3d", "parallel.tp=1", "parallel.pp=2", "parallel.schedule=zb_h1"), 2): (7, 10),
}


@pytest.mark.parametrize("layers", [2, 12])
def test_a_dense_block_is_one_graph_for_all_layers(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    stepped, graphs = run_compiled(Layout("dense"), monkeypatch, BF16, f"model.layers={layers}")
    plain = run_layout(Layout("dense"), CUDA, BF16, f"model.layers={layers}", watched=False)
    assert len(graphs.operators) == 1
    assert not graphs.breaks
    assert stepped.losses == pytest.approx(plain.losses, rel=0.01)


@pytest.mark.parametrize("layout", SHARED, ids=str)
def test_all_layers_share_the_graphs_of_a_block(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    for layers in (4, 2):
        stepped, graphs = run_compiled(layout, monkeypatch, BF16, f"model.layers={layers}")
        assert (len(graphs.operators), sum(graphs.breaks.values())) == SHARED[layout]
        assert not graphs.recompiled
    plain = run_layout(layout, CUDA, BF16, watched=False)
    assert stepped.losses == pytest.approx(plain.losses, rel=0.01)
