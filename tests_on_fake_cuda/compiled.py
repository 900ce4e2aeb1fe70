"""Steps with `run.compile=true` on the fake device, without a code generator: graphs and their breaks."""

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
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics


@dataclass
class Graphs:
    """The graphs that torch.compile traced in a run.

    operators   number of calls in each graph, in the order of compilation
    shapes      shapes of all tensors in the graphs, without sizes that may change
    breaks      breaks of graphs, by their reason
    recompiled  functions that were compiled again, for other inputs or other values of globals
    """

    operators: list[int] = field(default_factory=list)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    breaks: Counter[str] = field(default_factory=Counter)
    recompiled: list[str] = field(default_factory=list)


@contextmanager
def count_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Compile with a backend that counts, and runs graphs as they are."""
    graphs = Graphs()
    compile_function = torch.compile

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.operators.append(sum(node.op in ("call_function", "call_method") for node in module.graph.nodes))
        values = (node.meta.get("example_value") for node in module.graph.nodes)
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        graphs.shapes |= {tuple(size for size in shape if type(size) is int) for shape in shapes}
        return module.forward

    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: compile_function(function, backend=count))
        yield graphs
    for reason, number in counters["graph_break"].items():
        graphs.breaks[reason.split("\n")[0]] += number
    for compilation in get_compilation_metrics():
        if compilation.recompile_reason:
            graphs.recompiled.append(f"{compilation.co_name}: {compilation.recompile_reason}")


def run_compiled(layout: Layout, monkeypatch: pytest.MonkeyPatch, *settings: str) -> tuple[Stepped, Graphs]:
    """Run the steps of a layout with compiled blocks on the fake device."""
    with count_graphs(monkeypatch) as graphs:
        stepped = run_layout(layout, CUDA, "run.compile=true", *settings, watched=False)
    return stepped, graphs
