"""Steps with `run.compile=true` on the fake device, without a code generator: graphs, breaks and large tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo
from layouts import CUDA, Layout, Stepped, run_layout
from torch._dynamo.utils import counters


@dataclass
class Graphs:
    """What torch.compile made of a run.

    operators  number of calls in each graph, in the order of compilation
    breaks     breaks of graphs, by their reason
    limits     functions that were compiled too often and stay uncompiled
    squares    results whose last two sizes are both the sequence length, by operator and shape
    """

    operators: list[int] = field(default_factory=list)
    breaks: Counter[str] = field(default_factory=Counter)
    squares: Counter[str] = field(default_factory=Counter)
    limits: int = 0


@contextmanager
def count_graphs(monkeypatch: pytest.MonkeyPatch, length: int) -> Iterator[Graphs]:
    """Compile with a backend that counts, and runs graphs as they are."""
    graphs = Graphs()
    compile_function = torch.compile

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.operators.append(sum(node.op in ("call_function", "call_method") for node in module.graph.nodes))
        for node in module.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.dim() > 3 and value.shape[-2:] == (length, length):
                graphs.squares[f"{node.target} {tuple(value.shape)}"] += 1
        return module.forward

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_function(function, backend=count))
    yield graphs
    monkeypatch.undo()
    for reason, number in counters["graph_break"].items():
        graphs.breaks[reason.split("\n")[0]] += number
    graphs.limits = counters["unimplemented"].total() + sum(
        number for reason, number in counters["stats"].items() if "limit" in reason
    )


def run_compiled(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, *settings: str, length: int = 32
) -> tuple[Stepped, Graphs]:
    """Run the steps of a layout with compiled blocks on the fake device."""
    with count_graphs(monkeypatch, length) as graphs:
        stepped = run_layout(layout, CUDA, "run.compile=true", *settings, watched=False)
    return stepped, graphs
